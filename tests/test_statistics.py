"""Success rates and paired comparisons: published values, and properties that hold for all counts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment.statistics import Paired, Successes, compare, count_successes


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (score, no continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # R: prop.test(8, 10, correct = FALSE)
        (8, 10, 0.4902, 0.9433),
    ],
)
def test_wilson_interval_has_published_values(k, n, low, high):
    assert Successes(k, n).interval == pytest.approx((low, high), abs=6e-5)


def test_no_success_has_a_lower_bound_of_exactly_0_and_no_failure_an_upper_bound_of_exactly_1():
    # Otherwise a perfect evaluation would lie "below" an equally perfect baseline.
    for n in range(1, 101):
        assert Successes(0, n).interval[0] == 0.0
        assert Successes(n, n).interval[1] == 1.0


def test_successes_are_reported_with_k_n_and_interval():
    successes = count_successes(episode < 8 for episode in range(10))
    assert successes == Successes(8, 10)
    assert successes.metrics("eval/x") == pytest.approx(
        {"eval/x": 0.8, "eval/x_k": 8, "eval/x_n": 10, "eval/x_low": 0.4902, "eval/x_high": 0.9433}, abs=1e-4
    )
    assert str(successes) == "8/10 = 80 % [49, 94]"


# paired comparisons


def test_only_episodes_that_both_have_played_are_compared():
    before = {"a": True, "b": True, "c": False, "d": False, "only before": True}
    after = {"a": True, "b": False, "c": True, "d": False, "only after": True}
    assert compare(before, after) == Paired(both=1, only_before=1, only_after=1, neither=1)


def test_paired_interval_has_the_published_value():
    # R package contingencytables, Newcombe_square_and_add_CI_paired_2x2 on its table cavo_2012, value of its own test.
    assert Paired(59, 16, 6, 80).interval == pytest.approx((-0.1186, -0.0046), abs=6e-5)


counts = st.integers(0, 60)


@given(both=counts, lost=counts, won=counts, neither=st.integers(1, 60))
def test_interval_contains_the_difference_and_changes_sign_with_the_order(both, lost, won, neither):
    pairs = Paired(both, lost, won, neither)
    low, high = pairs.interval
    assert -1 <= low <= pairs.difference + 1e-12
    assert pairs.difference - 1e-12 <= high <= 1
    assert Paired(both, won, lost, neither).interval == pytest.approx((-high, -low))


@given(won=st.integers(0, 40), lost=st.integers(0, 40), agreed=st.integers(0, 40))
def test_p_value_is_the_two_sided_binomial_tail(won, lost, agreed):
    decided = won + lost
    probabilities = [math.comb(decided, k) / 2**decided for k in range(decided + 1)]
    as_extreme = [p for k, p in enumerate(probabilities) if min(k, decided - k) <= min(won, lost)]
    assert Paired(agreed, lost, won, agreed).p_value == pytest.approx(min(1.0, sum(as_extreme)))


def test_a_gain_is_shown_in_points_with_interval_and_p_value():
    assert str(Paired(both=20, only_before=2, only_after=12, neither=16)) == "+20 points [+6, +33], p = 0.013"
    assert str(Paired(both=300, only_before=1, only_after=0, neither=0)).startswith("+0 points [")
