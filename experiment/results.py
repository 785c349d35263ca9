"""What eval.py measures: success rates with intervals, two policies compared pair by pair, the results file, its table.

The file (docs/RESULTS_JSON.md) is replaced as a whole after every episode, so at any moment it is valid, and a kill
loses the episodes that were under way. It is its own journal: an evaluation that goes on reads which episodes it holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from contracts import BadInput, read_json, write_json
from envs.perturb import NONE
from envs.tasks import TaskInfo
from experiment.metrics import Successes

KIND = {"format": "vla-grpo evaluation", "version": 1}


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
    def before(self) -> Successes:
        return Successes(self.both + self.only_before, self.n)

    @property
    def after(self) -> Successes:
        return Successes(self.both + self.only_after, self.n)

    @property
    def difference(self) -> float:
        return (self.only_after - self.only_before) / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the difference: method 10 of Newcombe, Statistics in Medicine 17 (1998) 2635-2650."""
        before, after, n = self.before, self.after, self.n
        margins = after.k * (n - after.k) * before.k * (n - before.k)
        determinant = self.both * self.neither - self.only_after * self.only_before
        corrected = max(determinant - n / 2, 0.0) if determinant > 0 else determinant  # for continuity
        phi = corrected / math.sqrt(margins) if margins else 0.0

        def reach(one: float, other: float) -> float:
            return math.sqrt(max(one**2 - 2 * phi * one * other + other**2, 0.0))

        (low_before, high_before), (low_after, high_after) = before.interval, after.interval
        difference = after.rate - before.rate
        low = difference - reach(after.rate - low_after, high_before - before.rate)
        high = difference + reach(high_after - after.rate, before.rate - low_before)
        return max(low, -1.0), min(high, 1.0)

    @property
    def p_value(self) -> float:
        """Exact McNemar test: of the episodes that only one policy solved, each wins half by chance."""
        decided, fewer = self.only_before + self.only_after, min(self.only_before, self.only_after)
        return min(1.0, 2 * sum(math.comb(decided, k) for k in range(fewer + 1)) / 2**decided)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.difference:+.0f} points [{100 * low:+.0f}, {100 * high:+.0f}], p = {self.p_value:.2g}"


def compare(before: Mapping[Any, bool], after: Mapping[Any, bool]) -> Paired:
    """Pair the episodes that both have played; each is a key with its success."""
    counts = Counter((before[key], after[key]) for key in before.keys() & after.keys())
    return Paired(*(counts[cell] for cell in ((True, True), (True, False), (False, True), (False, False))))


def successes(played: Mapping[Any, bool]) -> Successes:
    return Successes(sum(played.values()), len(played))


class Key(NamedTuple):
    """What makes two episodes of two evaluations a pair."""

    task_suite: str
    task_id: int
    init_state_id: int
    repeat: int  # 0, unless there are more trials than initial states
    perturbation: str = NONE  # its label: envs.perturb


@dataclass(frozen=True)
class Plan:
    """What is to be played, in this order, and what stands in the results file beside the results."""

    tasks: Mapping[str, Sequence[TaskInfo]]  # by suite
    keys: Sequence[Key]
    head: Mapping[str, Any]  # protocol, command line, versions

    @property
    def perturbations(self) -> list[str]:
        """Labels, in the order in which they are played."""
        return list(dict.fromkeys(key.perturbation for key in self.keys if key.perturbation != NONE))


def make_plan(
    tasks: Mapping[str, Sequence[TaskInfo]], trials: int, first_init_state: int, head: Mapping[str, Any],
    perturbations: Sequence[str] = (), samples: bool = False,
) -> Plan:  # fmt: skip
    """Trial i of a task from initial state `first_init_state` + i; all of a task in a row, while it is built.

    First unperturbed, then by every one of `perturbations`. More trials than initial states are for a policy that
    samples: a greedy one would repeat itself, and count twice.
    """
    keys = []
    for suite, of_suite in tasks.items():
        for task in of_suite:
            if (states := task.num_init_states - first_init_state) <= 0:
                given = f"--first-init-state {first_init_state}: {suite} task {task.task_id}"
                raise BadInput(f"{given} has only {task.num_init_states} of them")
            count = trials if samples else min(trials, states)
            starts = [(suite, task.task_id, first_init_state + i % states, i // states) for i in range(count)]
            keys += [Key(*start, label) for label in (NONE, *perturbations) for start in starts]
    return Plan(tasks, keys, head)


@dataclass(frozen=True)
class Results:
    """The episodes of an evaluation, in memory and in its file."""

    path: Path
    settings: Mapping[str, Any]  # what decides, beside the key, how an episode ends: equal throughout a file
    episodes: dict[Key, dict[str, Any]] = field(default_factory=dict)

    def of(self, *part: Any, perturbation: str = NONE) -> dict[Key, bool]:
        """Start -> success, of a suite (`task_suite`), of a task (`task_suite, task_id`), or all."""
        found = {k: e["success"] for k, e in self.episodes.items() if k[: len(part)] == part}
        return {
            k._replace(perturbation=NONE): won for k, won in found.items() if k.perturbation == perturbation
        }


def save_results(results: Results, plan: Plan, before: Results | None = None) -> None:
    """Write the file; with `before`, also the comparison."""

    def outcome(*part: Any, perturbation: str = NONE) -> dict[str, Any]:
        played = results.of(*part, perturbation=perturbation)
        record: dict[str, Any] = {"success_n": 0}
        if played:
            record = successes(played).metrics("success")
        if before is not None:
            record |= pairs_record("compared", compare(before.of(*part, perturbation=perturbation), played))
        if perturbation != NONE:
            record |= pairs_record("against_unperturbed", compare(results.of(*part), played))
        return record

    def of_task(suite: str, t: TaskInfo) -> dict[str, Any]:
        told = {"name": t.name, "instruction": t.instruction, "max_env_steps": t.max_env_steps}
        return told | outcome(suite, t.task_id)

    suites = {
        suite: outcome(suite) | {"tasks": {str(task.task_id): of_task(suite, task) for task in tasks}}
        for suite, tasks in plan.tasks.items()
    }
    document = {
        **KIND,
        "complete": results.episodes.keys() >= set(plan.keys),
        "settings": results.settings,
        "compared_with": None if before is None else {"file": str(before.path), **before.settings},
        "all": outcome(),
        "suites": suites,
        "perturbed": {label: outcome(perturbation=label) for label in plan.perturbations},
        "episodes": [results.episodes[key] for key in sorted(results.episodes)],
        **plan.head,
    }
    try:
        results.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(results.path, document)
    except OSError as error:
        raise BadInput(f"--out {results.path}: cannot be written ({error.strerror or error})") from None


def pairs_record(name: str, pairs: Paired) -> dict[str, Any]:
    if pairs.n == 0:
        return {}
    low, high = pairs.interval
    difference = {"difference": pairs.difference, "low": low, "high": high, "p_value": pairs.p_value}
    return {name: {"n": pairs.n, **asdict(pairs), **difference}}


def read_results(path: Path) -> Results:
    """Read a results file. Raises BadInput."""
    stored = read_json(path)
    if not stored.items() >= KIND.items():
        raise BadInput(f"{path}: no results file of eval.py, version {KIND['version']}; name another")
    try:
        episodes = {Key(*(e[name] for name in Key._fields)): e for e in stored["episodes"]}
        return Results(path, stored["settings"], episodes)
    except (KeyError, TypeError) as error:
        raise BadInput(f"{path}: damaged: a field is missing or unknown ({error})") from None


def open_results(
    path: Path, settings: Mapping[str, Any], plan: Plan, other: Results | None = None
) -> Results:
    """The results in `path`, to go on with, or new ones. `other`: what they will be compared with. Raises BadInput."""
    if other is not None:
        for name in ("temperature", "assets", "bddl_sha256", "mode"):
            old, new = other.settings.get(name), settings[name]
            if old != new and (
                name != "mode" or "sample" in (old, new)
            ):  # the L1 head is as deterministic as greedy
                raise BadInput(
                    f"--compare-with {other.path} was evaluated with {name} {old}, this with {new}"
                )
        if other.episodes.keys().isdisjoint(plan.keys):
            raise BadInput(
                f"--compare-with {other.path} has no episode (task, initial state) in common with this"
            )
    if not path.exists():
        return Results(path, settings)
    results = read_results(path)
    stored = results.settings
    changed = [
        f"{name} (file: {stored.get(name)}, now: {v})"
        for name, v in settings.items()
        if stored.get(name) != v
    ]
    if changed:
        raise BadInput(
            f"--out {path} holds an evaluation with other settings: {', '.join(changed)}; name another file"
        )
    if strange := results.episodes.keys() - set(plan.keys):
        raise BadInput(
            f"--out {path} holds {len(strange)} episodes that this evaluation leaves out; name another file"
        )
    return results


def results_table(results: Results, plan: Plan, before: Results | None = None) -> list[str]:
    """A line for each task, each suite and all; with `before`, what has changed on the episodes that both have."""

    def row(label: str, instruction: str, *part: Any) -> tuple[str, ...]:
        played = results.of(*part)
        if before is None:
            rate = str(successes(played)) if played else "not played"
            return label, rate, instruction
        if (pairs := compare(before.of(*part), played)).n == 0:
            return label, "", "", "no pairs", ""
        won_and_lost = f"{pairs.n}: +{pairs.only_after} -{pairs.only_before}"
        return label, str(pairs.before), str(pairs.after), str(pairs), won_and_lost

    columns = ("success", "instruction") if before is None else ("before", "after", "difference", "pairs")
    rows: list[tuple[str, ...]] = [("task", *columns)]
    for suite, tasks in plan.tasks.items():
        rows += [row(f"{suite} {task.task_id}", task.instruction, suite, task.task_id) for task in tasks]
        rows.append(row(f"{suite} all", "", suite))
    if len(plan.tasks) > 1:
        rows.append(row("all suites", ""))
    rows[0] = (*rows[0][:-1], f"{rows[0][-1]}; assets: {results.settings['assets']}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
