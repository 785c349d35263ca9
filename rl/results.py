"""What eval.py measures: success rates with intervals, two policies compared pair by pair, the results file, its table.

The file (docs/RESULTS_JSON.md) is replaced as a whole after every episode, so at any moment it is valid, and a kill
loses the episodes that were under way. It is its own journal: an evaluation that goes on reads which episodes it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contracts import BadInput, read_json, write_json
from envs.tasks import TaskInfo

FORMAT, VERSION = "vla-grpo evaluation", 1

# success rates


@dataclass(frozen=True)
class Successes:
    """k successes of n episodes."""

    k: int
    n: int

    @property
    def rate(self) -> float:
        return self.k / self.n

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.k, self.n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.k}/{self.n} = {100 * self.rate:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"

    def metrics(self, name: str) -> dict[str, float]:
        low, high = self.interval
        return {name: self.rate, f"{name}_k": self.k, f"{name}_n": self.n, f"{name}_low": low, f"{name}_high": high}


def count(episodes: Sequence[Any]) -> Successes:
    """Of trajectories, or of records of them."""
    return Successes(sum(episode.success for episode in episodes), len(episodes))


def wilson_interval(k: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a success rate, 95 % by default (Wilson 1927).

    >>> low, high = wilson_interval(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    if n == 0:
        return 0.0, 1.0
    rate = k / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)


@dataclass(frozen=True)
class Paired:
    """How many of the same episodes each of two policies solved."""

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
        decided, fewer = self.only_before + self.only_after, min(self.only_before, self.only_after)
        return min(1.0, 2 * sum(math.comb(decided, k) for k in range(fewer + 1)) / 2**decided)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.difference:+.0f} points [{100 * low:+.0f}, {100 * high:+.0f}], p = {self.p_value:.2g}"

    def record(self) -> dict[str, float]:
        """Plain data for a results file; rates, not points."""
        low, high = self.interval
        of_all = {"difference": self.difference, "low": low, "high": high, "p_value": self.p_value}
        return {"n": self.n, **asdict(self), **of_all}


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


# the plan


class Key(NamedTuple):
    """What makes two episodes of two evaluations a pair."""

    task_suite: str
    task_id: int
    init_state_id: int
    repeat: int  # 0, unless there are more trials than initial states


@dataclass(frozen=True)
class Plan:
    """What is to be played, in this order, and what stands in the results file beside the results."""

    tasks: Mapping[str, Sequence[TaskInfo]]  # by suite
    keys: Sequence[Key]
    head: Mapping[str, Any]  # protocol, command line, versions


def make_plan(
    tasks: Mapping[str, Sequence[TaskInfo]], trials: int, first_init_state: int, head: Mapping[str, Any]
) -> Plan:
    """Trial i starts from initial state `first_init_state` + i; after the last state it starts over with the first.

    Trial i of every task of a suite comes before trial i + 1 of any: a look at an unfinished file covers all tasks.
    Raises BadInput when a task has no such initial state.
    """
    keys = []
    for suite, of_suite in tasks.items():
        for task in of_suite:
            if first_init_state >= task.num_init_states:
                raise BadInput(
                    f"--first-init-state {first_init_state}: {suite} task {task.task_id} has only "
                    f"{task.num_init_states} of them"
                )
        for trial in range(trials):
            for task in of_suite:
                repeat, offset = divmod(trial, task.num_init_states - first_init_state)
                keys.append(Key(suite, task.task_id, first_init_state + offset, repeat))
    return Plan(tasks, keys, head)


# the results file


@dataclass(frozen=True)
class PlayedEpisode:
    """One episode and how it ended."""

    task_suite: str
    task_id: int
    init_state_id: int
    repeat: int
    seed: int
    mode: str
    success: bool
    env_steps: int
    decisions: int
    seconds: float  # wall time, waiting for other episodes of the batch included
    error: str | None  # a simulator fault after which the episode was played again; null nearly always
    video: str | None  # relative to the results file

    @property
    def key(self) -> Key:
        return Key(self.task_suite, self.task_id, self.init_state_id, self.repeat)


@dataclass(frozen=True)
class Settings:
    """Everything beside the episode that decides how it ends: one file holds episodes of equal settings."""

    checkpoint: str
    weights: str  # fingerprint: `best` is a pointer that moves
    mode: Literal["greedy", "sample", "l1"]  # how the policy decides
    temperature: float | None  # of sampling
    seed: int
    assets: str
    bddl_sha256: str | None
    device: str
    dtype: str


class Results:
    """The episodes of an evaluation, in memory and in its file."""

    def __init__(self, path: Path, settings: Settings, episodes: Iterable[PlayedEpisode] = ()):
        self.path, self.settings = path, settings
        self.episodes = {episode.key: episode for episode in episodes}

    def of(self, task_suite: str | None = None, task_id: int | None = None) -> list[PlayedEpisode]:
        """The episodes of a suite, of a task, or all."""
        return [
            episode
            for episode in self.episodes.values()
            if task_suite in (None, episode.task_suite) and task_id in (None, episode.task_id)
        ]


def compare(before: Results, after: Results, task_suite: str | None = None, task_id: int | None = None) -> Paired:
    """Pair the episodes that both have, of a suite, of a task, or all."""
    return count_pairs(
        (before.episodes[episode.key].success, episode.success)
        for episode in after.of(task_suite, task_id)
        if episode.key in before.episodes
    )


def save_results(results: Results, plan: Plan, before: Results | None = None) -> None:
    """Write the file; with `before`, also the comparison."""

    def outcome(*part: Any) -> dict[str, Any]:
        played = count(results.of(*part)).metrics("success") if results.of(*part) else {"success_n": 0}
        pairs = compare(before, results, *part) if before is not None else None
        return {**played, **({"compared": pairs.record()} if pairs is not None and pairs.n else {})}

    suites: dict[str, Any] = {}
    for suite, tasks in plan.tasks.items():
        of_tasks = {
            str(t.task_id): {"name": t.name, "instruction": t.instruction, "max_env_steps": t.max_env_steps}
            | outcome(suite, t.task_id)
            for t in tasks
        }
        suites[suite] = {**outcome(suite), "tasks": of_tasks}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "complete": results.episodes.keys() >= set(plan.keys),
        "settings": asdict(results.settings),
        "compared_with": None if before is None else {"file": str(before.path), **asdict(before.settings)},
        "all": outcome(),
        "suites": suites,
        "episodes": [asdict(episode) for episode in sorted(results.episodes.values(), key=lambda e: e.key)],
        **plan.head,
    }
    try:
        results.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(results.path, document)
    except OSError as error:
        raise BadInput(f"--out {results.path}: cannot be written ({error.strerror or error})") from None


def read_results(path: Path, flag: str) -> Results:
    """Read a results file. Raises BadInput, naming the flag that named it."""
    try:
        stored = read_json(path)
    except BadInput as problem:
        raise BadInput(f"{flag} {problem}") from None
    if (stored.get("format"), stored.get("version")) != (FORMAT, VERSION):
        raise BadInput(f"{flag} {path}: no results file of eval.py, version {VERSION}; name another")
    try:
        episodes = [PlayedEpisode(**episode) for episode in stored["episodes"]]
        return Results(path, Settings(**stored["settings"]), episodes)
    except (KeyError, TypeError) as error:
        raise BadInput(f"{flag} {path}: damaged: a field is missing or unknown ({error})") from None


def open_results(path: Path, settings: Settings, plan: Plan, other: Results | None = None) -> Results:
    """The results in `path`, to go on with, or new ones, which will be compared with `other`.

    Raises BadInput where the file is of another evaluation, or a difference need not come from the policies.
    """
    if other is not None:
        refused = f"--compare-with {other.path}: it"
        for name in ("temperature", "assets", "bddl_sha256", "mode"):
            old, new = getattr(other.settings, name), getattr(settings, name)
            if old != new and (name != "mode" or "sample" in (old, new)):  # the L1 head is as deterministic as greedy
                raise BadInput(f"{refused} was evaluated with {name} {old}, this with {new}")
        if other.episodes.keys().isdisjoint(plan.keys):
            raise BadInput(f"{refused} has no episode (task, initial state) in common with this")
    if not path.exists():
        return Results(path, settings)
    results = read_results(path, "--out")
    stored, wanted = asdict(results.settings), asdict(settings)
    changed = [f"{name} (file: {stored[name]}, now: {wanted[name]})" for name in stored if stored[name] != wanted[name]]
    if changed:
        raise BadInput(f"--out {path} holds an evaluation with other settings: {', '.join(changed)}; name another file")
    if strange := results.episodes.keys() - set(plan.keys):
        raise BadInput(f"--out {path} holds {len(strange)} episodes that this evaluation leaves out; name another file")
    return results


# the table


def results_table(results: Results, plan: Plan, before: Results | None = None) -> list[str]:
    """A line for each task, each suite and all; with `before`, of the episodes that both have, and what has changed."""

    def row(label: str, instruction: str, *part: Any) -> tuple[str, ...]:
        episodes = results.of(*part)
        if before is None:
            return label, str(count(episodes)) if episodes else "not played", instruction
        after = [episode for episode in episodes if episode.key in before.episodes]
        if not after:
            return label, "", "", "no pairs", ""
        pairs = compare(before, results, *part)
        earlier = str(count([before.episodes[episode.key] for episode in after]))
        return label, earlier, str(count(after)), str(pairs), f"{pairs.n}: +{pairs.only_after} -{pairs.only_before}"

    heading = ("task", "success", "instruction"), ("task", "before", "after", "difference", "pairs")
    rows: list[tuple[str, ...]] = [heading[before is not None]]
    for suite, tasks in plan.tasks.items():
        rows += [row(f"{suite} {task.task_id}", task.instruction, suite, task.task_id) for task in tasks]
        rows.append(row(f"{suite} all", "", suite))
    if len(plan.tasks) > 1:
        rows.append(row("all suites", ""))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines whose columns stand below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
