"""Paired comparisons: published intervals, exact coverage, the binomial sum of McNemar's test."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.evaluation import wilson_interval
from rl.paired import Paired, count_pairs, newcombe_interval

cells = st.integers(0, 60)


def test_interval_has_the_published_value():
    # R package contingencytables, Newcombe_square_and_add_CI_paired_2x2 on its table cavo_2012, value of its own test.
    assert newcombe_interval(59, 6, 16, 80) == pytest.approx((-0.1186, -0.0046), abs=6e-5)


@given(e=cells, f=cells, g=cells, h=cells)
def test_interval_contains_the_difference_and_changes_sign_with_the_order(e, f, g, h):
    low, high = newcombe_interval(e, f, g, h)
    if n := e + f + g + h:
        assert -1 <= low <= (f - g) / n + 1e-12
        assert (f - g) / n - 1e-12 <= high <= 1
        assert newcombe_interval(e, g, f, h) == pytest.approx((-high, -low))


def test_interval_without_correlation_is_the_hybrid_score_interval_of_independent_rates():
    low, high = newcombe_interval(6, 4, 9, 6)  # 6 * 6 = 4 * 9: phi is 0
    (l1, u1), (l2, u2) = wilson_interval(10, 25), wilson_interval(15, 25)
    assert low == pytest.approx(-0.2 - math.hypot(0.4 - l1, u2 - 0.6))
    assert high == pytest.approx(-0.2 + math.hypot(u1 - 0.4, 0.6 - l2))


@pytest.mark.parametrize("rates", [(0.4, 0.25, 0.1, 0.25), (0.7, 0.15, 0.05, 0.1), (0.25, 0.25, 0.25, 0.25)])
def test_interval_covers_the_true_difference_in_95_percent_of_all_outcomes(rates):
    n, covered = 20, 0.0  # the multinomial distribution of all tables of 20 pairs, summed
    for e, f, g in product(range(n + 1), repeat=3):
        if (h := n - e - f - g) >= 0:
            low, high = newcombe_interval(e, f, g, h)
            ways = math.factorial(n) / math.prod(map(math.factorial, (e, f, g, h)))
            if low <= rates[1] - rates[2] <= high:
                covered += ways * math.prod(rate**count for rate, count in zip(rates, (e, f, g, h), strict=True))
    assert 0.94 < covered < 0.98


@given(won=st.integers(0, 40), lost=st.integers(0, 40), agreed=st.integers(0, 40))
def test_p_value_is_the_binomial_sum(won, lost, agreed):
    decided, fewer = won + lost, min(won, lost)
    tail = sum(math.comb(decided, k) for k in range(fewer + 1)) / 2**decided
    assert Paired(agreed, lost, won, agreed).p_value == pytest.approx(min(1.0, 2 * tail))


def test_pairs_are_counted():
    pairs = count_pairs([(True, True), (True, False), (False, True), (False, True), (False, False)])
    assert pairs == Paired(both=1, only_before=1, only_after=2, neither=1)
    assert pairs.difference == pytest.approx(0.2)


def test_a_gain_is_shown_in_points_with_interval_and_p_value():
    text = str(Paired(both=20, only_before=2, only_after=12, neither=16))
    assert text == "+20 points [+6, +33], p = 0.013"
    assert Paired(20, 2, 12, 16).record()["n"] == 50
