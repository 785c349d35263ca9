"""Two policies on the same episodes: the difference of their success rates, its interval, its p-value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scipy.stats import binomtest

from rl.evaluation import wilson_interval


@dataclass(frozen=True)
class Paired:
    """How many episodes each of two policies solved."""

    both: int
    only_before: int
    only_after: int
    neither: int

    @property
    def n(self) -> int:
        return self.both + self.only_before + self.only_after + self.neither

    @property
    def difference(self) -> float:
        """Success rate after minus before."""
        return (self.only_after - self.only_before) / self.n

    @property
    def interval(self) -> tuple[float, float]:
        return newcombe_interval(self.both, self.only_after, self.only_before, self.neither)

    @property
    def p_value(self) -> float:
        """Exact McNemar test: of the episodes that only one policy solved, each wins half by chance."""
        decided = self.only_before + self.only_after
        return float(binomtest(self.only_after, decided).pvalue) if decided else 1.0

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.difference:+.0f} points [{100 * low:+.0f}, {100 * high:+.0f}], p = {self.p_value:.2g}"

    def record(self) -> dict[str, float]:
        """Plain data for a results file; rates, not points."""
        low, high = self.interval
        return {
            "n": self.n,
            "both": self.both,
            "only_before": self.only_before,
            "only_after": self.only_after,
            "neither": self.neither,
            "difference": self.difference,
            "low": low,
            "high": high,
            "p_value": self.p_value,
        }


def count_pairs(pairs: Iterable[tuple[bool, bool]]) -> Paired:
    """Count (success before, success after) of episodes that both policies played."""
    pairs = list(pairs)
    cells = ((True, True), (True, False), (False, True), (False, False))
    return Paired(*(pairs.count(cell) for cell in cells))


def newcombe_interval(e: int, f: int, g: int, h: int) -> tuple[float, float]:
    """95 % interval of a difference of paired proportions, (e + f) / n - (e + g) / n.

    e pairs succeed twice, f only with the first, g only with the second, h never. Method 10 of Newcombe, Statistics in
    Medicine 17 (1998) 2635-2650: the Wilson intervals of the two rates, squared and added, less twice the product
    with the correlation phi, whose numerator is corrected for continuity where it is positive.

    >>> low, high = newcombe_interval(59, 6, 16, 80)
    >>> round(low, 4), round(high, 4)
    (-0.1186, -0.0046)
    """
    n = e + f + g + h
    if n == 0:
        return -1.0, 1.0
    first, second = (e + f) / n, (e + g) / n
    (low_1, high_1), (low_2, high_2) = wilson_interval(e + f, n), wilson_interval(e + g, n)
    margins = (e + f) * (g + h) * (e + g) * (f + h)
    determinant = e * h - f * g
    corrected = max(determinant - n / 2, 0.0) if determinant > 0 else determinant
    phi = corrected / math.sqrt(margins) if margins else 0.0

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(one**2 - 2 * phi * one * other + other**2, 0.0))

    low = first - second - reach(first - low_1, high_2 - second)
    high = first - second + reach(high_1 - first, second - low_2)
    return max(low, -1.0), min(high, 1.0)
