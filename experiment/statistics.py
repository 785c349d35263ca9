"""Compute success rates with their intervals, and compare two policies episode by episode."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Z = 1.959963984540054  # standard normal quantile of 95 % intervals

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Successes:
    """k successes in n episodes. Its rate and interval raise ZeroDivisionError if n is 0."""

    k: int
    n: int

    @property
    def rate(self) -> float:
        return self.k / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % score interval of the rate (Wilson, JASA 22 (1927) 209-212)."""
        rate = self.rate
        n = self.n
        shrinkage = 1 + Z * Z / n
        centre = (rate + Z * Z / (2 * n)) / shrinkage
        half_width = Z / shrinkage * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n))
        # Without a success the lower bound is exactly 0, without a failure the upper is 1, whatever rounding does.
        low = 0.0 if self.k == 0 else centre - half_width
        high = 1.0 if self.k == n else centre + half_width
        return low, high

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.k}/{self.n} = {100 * self.rate:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"

    def metrics(self, name: str) -> dict[str, float]:
        """Rate, counts and interval, under `name` and names that begin with `name`."""
        low, high = self.interval
        return {
            name: self.rate,
            f"{name}_k": self.k,
            f"{name}_n": self.n,
            f"{name}_low": low,
            f"{name}_high": high,
        }


def count_successes(outcomes: Iterable[bool]) -> Successes:
    """Count the True ones among the outcomes of episodes."""
    outcomes = list(outcomes)
    return Successes(sum(outcomes), len(outcomes))


@dataclass(frozen=True)
class Paired:
    """How many of the same episodes were solved by both, one or none of two policies, called before and after."""

    both: int
    only_before: int
    only_after: int
    neither: int

    @property
    def n(self) -> int:
        return self.both + self.only_before + self.only_after + self.neither

    @property
    def before(self) -> Successes:
        return Successes(self.both + self.only_before, self.n)

    @property
    def after(self) -> Successes:
        return Successes(self.both + self.only_after, self.n)

    @property
    def difference(self) -> float:
        """Success rate after minus success rate before."""
        return (self.only_after - self.only_before) / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference (Newcombe, Statistics in Medicine 17 (1998) 2635-2650, method 10)."""
        before = self.before
        after = self.after
        low_before, high_before = before.interval
        low_after, high_after = after.interval
        phi = self._correlation()
        difference = after.rate - before.rate
        low = difference - _combined(after.rate - low_after, high_before - before.rate, phi)
        high = difference + _combined(high_after - after.rate, before.rate - low_before, phi)
        return max(low, -1.0), min(high, 1.0)

    def _correlation(self) -> float:
        """Newcombe's phi: correlation of the two outcomes, a positive one corrected for continuity."""
        n = self.n
        margins = self.after.k * (n - self.after.k) * self.before.k * (n - self.before.k)
        if margins == 0:
            return 0.0
        determinant: float = self.both * self.neither - self.only_after * self.only_before
        if determinant > 0:
            determinant = max(determinant - n / 2, 0.0)
        return determinant / math.sqrt(margins)

    @property
    def p_value(self) -> float:
        """Exact McNemar test: by chance each policy solves half of the episodes that only one of them solves."""
        decided = self.only_before + self.only_after
        fewer = min(self.only_before, self.only_after)
        tail = sum(math.comb(decided, k) for k in range(fewer + 1)) / 2**decided
        return min(1.0, 2 * tail)

    def __str__(self) -> str:
        low, high = self.interval
        points = [f"{round(100 * share):+d}" for share in (self.difference, low, high)]
        return f"{points[0]} points [{points[1]}, {points[2]}], p = {self.p_value:.2g}"


def _combined(width: float, other_width: float, phi: float) -> float:
    """Distance of a bound from the difference of two rates.

    `width`, `other_width`: distances of the two rates from their own bounds. `phi`: correlation of the outcomes.
    """
    return math.sqrt(max(width**2 - 2 * phi * width * other_width + other_width**2, 0.0))


def compare(before: Mapping[Key, bool], after: Mapping[Key, bool]) -> Paired:
    """Pair the episodes that both policies have played; each mapping is from an episode to its success."""
    counts = Counter((before[episode], after[episode]) for episode in before.keys() & after.keys())
    return Paired(
        both=counts[True, True],
        only_before=counts[True, False],
        only_after=counts[False, True],
        neither=counts[False, False],
    )
