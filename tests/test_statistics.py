"""Success rates and paired comparisons: values of other programs, and properties that hold for all counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment.statistics import Paired, Successes, compare, count_successes


def test_successes_are_reported_with_k_n_and_wilson_interval():
    successes = count_successes(episode < 8 for episode in range(10))
    assert successes == Successes(8, 10)
    assert successes.interval == pytest.approx(
        (0.4902, 0.9433), abs=6e-5
    )  # R: prop.test(8, 10, correct = FALSE)
    assert str(successes) == "8/10 = 80 % [49, 94]"


def test_only_episodes_that_both_have_played_are_compared():
    before = {"a": True, "b": True, "c": False, "d": False, "only before": True}
    after = {"a": True, "b": False, "c": True, "d": False, "only after": True}
    assert compare(before, after) == Paired(both=1, only_before=1, only_after=1, neither=1)


def test_paired_interval_covers_the_true_difference_in_95_of_100_samples():
    rng = np.random.default_rng(0)
    samples = rng.multinomial(50, [0.4, 0.1, 0.3, 0.2], size=4_000)  # the true difference is 0.2
    intervals = [Paired(*sample.tolist()).interval for sample in samples]
    assert np.mean([low <= 0.2 <= high for low, high in intervals]) == pytest.approx(0.95, abs=0.015)


counts = st.integers(0, 60)


@given(both=counts, lost=counts, won=counts, neither=st.integers(1, 60))
def test_interval_contains_the_difference_and_changes_sign_with_the_order(both, lost, won, neither):
    pairs = Paired(both, lost, won, neither)
    low, high = pairs.interval
    assert -1 <= low <= pairs.difference <= high <= 1
    assert low < high
    assert Paired(both, won, lost, neither).interval == pytest.approx((-high, -low))


def test_a_gain_is_shown_in_points_with_interval_and_exact_p_value():
    # 2 against 12: 2 * (1 + 14 + 91) / 2^14
    assert str(Paired(both=20, only_before=2, only_after=12, neither=16)) == "+20 points [+5, +33], p = 0.013"
    assert str(Paired(both=300, only_before=0, only_after=0, neither=0)).endswith("p = 1")
