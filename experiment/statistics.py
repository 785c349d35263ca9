"""Success rates with their intervals, and the comparison of two policies episode by episode."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from scipy.stats._result_classes import BinomTestResult

Z = NormalDist().inv_cdf(0.975)  # of 95 % intervals
LEVEL = 0.05  # a difference is within chance if its p value is not below this

Key = TypeVar("Key", bound=Hashable)


def binomial_test(successes: int, trials: int) -> BinomTestResult:
    """Scipy's, imported only here: it takes most of a second, and many programs print no rate."""
    from scipy.stats import binomtest

    return binomtest(successes, trials)


@dataclass(frozen=True)
class Successes:
    """k successes in n episodes; n is above 0."""

    k: int
    n: int

    @property
    def rate(self) -> float:
        return self.k / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % score interval of the rate (Wilson)."""
        interval = binomial_test(self.k, self.n).proportion_ci(method="wilson")
        return float(interval.low), float(interval.high)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.k}/{self.n} = {100 * self.rate:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


Rates = Mapping[str, Successes]  # by the name of the rule of acting


def count_successes(outcomes: Iterable[bool]) -> Successes:
    """Count the True ones among the outcomes of episodes."""
    outcomes = list(outcomes)
    return Successes(sum(outcomes), len(outcomes))


def rates_by_task(name: str, outcomes: Iterable[tuple[int, bool]]) -> dict[str, float]:
    """The success rate of all episodes, under this name, and of each task if there are several.

    outcomes: the task id and the success of each episode.
    """
    by_name: dict[str, list[bool]] = {name: []}
    for task_id, success in sorted(outcomes):
        by_name[name].append(success)
        by_name.setdefault(f"{name}_task_{task_id}", []).append(success)
    if len(by_name) == 2:  # the only task's rate is that of all
        by_name.popitem()
    return {name: count_successes(successes).rate for name, successes in by_name.items()}


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
        """95 % interval of the difference (Bonett and Price, J. Educational Behavioral Statistics 37 (2012) 479)."""
        n = self.n + 2
        won = (self.only_after + 1) / n
        lost = (self.only_before + 1) / n
        difference = won - lost
        half_width = Z * math.sqrt((won + lost - difference**2) / n)
        return max(difference - half_width, -1.0), min(difference + half_width, 1.0)

    @property
    def p_value(self) -> float:
        """Exact McNemar test: by chance each policy solves half of the episodes that only one of them solves."""
        decided = self.only_before + self.only_after
        return float(binomial_test(self.only_after, decided).pvalue) if decided else 1.0

    @property
    def kind(self) -> Literal["better", "worse", "within chance"]:
        if self.p_value >= LEVEL:
            return "within chance"
        return "better" if self.difference > 0 else "worse"

    def __str__(self) -> str:
        low, high = self.interval
        points = [f"{round(100 * share):+d}" for share in (self.difference, low, high)]
        return f"{points[0]} points [{points[1]}, {points[2]}], p = {self.p_value:.2g}"


def compare(before: Mapping[Key, bool], after: Mapping[Key, bool]) -> Paired:
    """Pair the episodes that both policies have played; each mapping is from an episode to its success."""
    counts = Counter((before[episode], after[episode]) for episode in before.keys() & after.keys())
    return Paired(
        both=counts[True, True],
        only_before=counts[True, False],
        only_after=counts[False, True],
        neither=counts[False, False],
    )
