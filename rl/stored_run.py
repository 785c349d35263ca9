"""A run folder read back: its records, its settings, its evaluations. Everything that reports show comes from here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.cli import preset_of
from configs.config import SECTIONS, PhaseConfig, TrainConfig, to_dict
from configs.field_types import check_types
from configs.presets import PRESETS
from errors import BadInput
from rl.evaluation import Successes
from rl.evaluation_files import read_episodes
from rl.paired import Paired, count_pairs
from rl.phases import Phase, last_step
from rl.run import read_metrics
from untrusted.json_file import as_object, read_json, required

TEACHER, GREEDY, SAMPLED = "eval/teacher_success", "eval/student_success", "eval/student_sampled_success"
NOT_SHOWN = {"name", "output", "seed", "keep_checkpoints", "wandb_mode", "wandb_project", "tensorboard", "rerun"}
NEEDED = ("task_suite", "task_ids", "bddl_file", "warmup_only", "warmup_steps", "total_steps")  # settings

Row = Mapping[str, Any]  # of metrics.jsonl


@dataclass(frozen=True)
class StoredRun:
    """`settings` and `provenance` are as the run stored them: a field that came later is missing."""

    folder: Path
    rows: Sequence[Row]
    settings: dict[str, Any]  # field name -> value, all sections together
    provenance: dict[str, Any]  # argv, git, versions, machine

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def global_step(self) -> int:
        """Env steps of training so far."""
        return self.rows[-1]["global_step"] if self.rows else 0

    @property
    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if is_evaluation(row)]

    @property
    def updates(self) -> list[Row]:
        return [row for row in self.rows if "schedule/phase" in row]

    @property
    def best_evaluation(self) -> Row:
        """The one with the highest lower bound of the greedy student, the first of equals: as `checkpoints/best`."""
        return max(self.evaluations, key=lambda row: row[f"{GREEDY}_low"])

    @property
    def is_finished(self) -> bool:
        phases = PhaseConfig(**{k: self.settings[k] for k in ("warmup_only", "warmup_steps", "total_steps")})
        return bool(self.evaluations) and self.evaluations[-1]["global_step"] >= last_step(phases)


def read_run(folder: Path) -> StoredRun:
    """Read a run folder, finished or not. Raises BadInput."""
    path = folder / "config.json"
    try:
        stored = read_json(path)
        sections = as_object(stored.pop("config", None), f"{path}: config")
        settings = {
            field: value
            for name, section in sections.items()
            for field, value in as_object(section, f"{path}: {name}").items()
        }
        _check_provenance(stored, settings, str(path))
        rows = read_metrics(folder)
    except BadInput as problem:
        raise BadInput(f"{folder} is not a run folder: {problem}") from None
    except TypeError as error:  # of check_types
        raise BadInput(f"{folder} is not a run folder: {path}: {error}") from None
    for row in rows:
        _check_row(row, f"{folder / 'metrics.jsonl'}: the record of env step {row['global_step']}")
    return StoredRun(folder, rows, settings, stored)


def _check_provenance(stored: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> None:
    """Raise BadInput or TypeError unless everything is there that a report cannot do without."""
    needed = {name: required(settings, name, where) for name in NEEDED}
    for section in SECTIONS.values():
        check_types(section, needed)
    versions, machine = (
        as_object(required(stored, name, where), f"{where}: {name}") for name in ("versions", "machine")
    )
    for name in ("cpus", "processor", "system"):
        required(machine, name, f"{where}: machine")
    texts = required(stored, "argv", where), list(versions.values()), machine.get("gpus", [])
    if not all(isinstance(part, list) and all(isinstance(text, str) for text in part) for part in texts):
        raise TypeError("argv, versions and gpus should be texts")
    git = as_object(required(stored, "git", where) or {}, f"{where}: git")
    if git and not isinstance(git.get("commit"), str):
        raise TypeError("git names no commit")


def _check_row(row: Row, where: str) -> None:
    """Raises BadInput for an update of no phase, and an evaluation whose rates are not k of n."""
    if "schedule/phase" in row and row["schedule/phase"] not in range(len(Phase)):
        raise BadInput(f"{where}: schedule/phase is {row['schedule/phase']}, expected 0, 1 or 2")
    if not is_evaluation(row):
        return
    for key in (TEACHER, GREEDY, SAMPLED):
        counts: list[Any] = [row.get(f"{key}{part}") for part in ("", "_low", "_high", "_k", "_n")]
        rate, low, high, k, n = counts
        if None in counts or not (0 <= low <= rate <= high <= 1 and 0 <= k <= n >= 1):
            raise BadInput(f"{where}: {key} is no rate of k successes in n episodes with an interval")
        rates = [value for name, value in row.items() if name.startswith(f"{key}_task_")]
        if len(rates) > n or not all(value is not None and 0 <= value <= 1 for value in rates):
            raise BadInput(f"{where}: {key} holds no success rates of tasks")


def is_evaluation(row: Row) -> bool:
    return GREEDY in row


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Env steps and values of a metric where it was recorded."""
    present = [row for row in rows if row.get(key) is not None]
    return [row["global_step"] for row in present], [row[key] for row in present]


def successes_of(row: Row, key: str) -> Successes:
    """The counts of an evaluated success rate; per task they follow from the total, all tasks play equally often."""
    if f"{key}_k" in row:
        return Successes(int(row[f"{key}_k"]), int(row[f"{key}_n"]))
    total, _, _ = key.partition("_task_")
    num_tasks = sum(name.startswith(f"{total}_task_") for name in row)
    played = int(row[f"{total}_n"]) // num_tasks
    return Successes(round(row[key] * played), played)


def paired_difference(before: Sequence[Row], after: Sequence[Row]) -> Paired | None:
    """Episodes of the same task, initial state and trial in two evaluations; None when there are none."""
    earlier = {_identity(episode): episode["success"] for episode in before}
    pairs = [(earlier[_identity(e)], e["success"]) for e in after if _identity(e) in earlier]
    return count_pairs(pairs) if pairs else None


def _identity(episode: Row) -> tuple[int, int, int]:
    return episode["task_id"], episode["init_state_id"], episode["trial"]


@dataclass(frozen=True)
class Change:
    """A line of the table of results: two success rates and, on equal episodes, their difference."""

    label: str
    before: Successes
    after: Successes
    paired: Paired | None = None


def changes(run: StoredRun) -> list[Change]:
    """Sampled and greedy student from the first to the last evaluation, and the student against its teacher.

    Raises BadInput when the run has no evaluation yet.
    """
    if not run.evaluations:
        raise BadInput(f"{run.folder}: no evaluation has been recorded yet")
    first, last = run.evaluations[0], run.evaluations[-1]
    start, end = (read_episodes(run.folder, row["global_step"]) for row in (first, last))
    return [
        Change(
            "student, sampled", successes_of(first, SAMPLED), successes_of(last, SAMPLED),
            paired_difference(start.get("student_sampled", ()), end.get("student_sampled", ())),
        ),
        Change(
            "student, greedy", successes_of(first, GREEDY), successes_of(last, GREEDY),
            paired_difference(start.get("student", ()), end.get("student", ())),
        ),
        Change(
            "teacher, then greedy student", successes_of(first, TEACHER), successes_of(last, GREEDY),
            paired_difference(start.get("teacher", ()), end.get("student", ())),
        ),
    ]  # fmt: skip


def task_changes(run: StoredRun) -> dict[int, list[Change]]:
    """Per task what became of the sampled and the greedy student; of a single task that is the total."""
    first, last = run.evaluations[0], run.evaluations[-1]
    return {
        task_id: [
            Change(label, successes_of(first, of_task), successes_of(last, of_task))
            for label, key in (("sampled", SAMPLED), ("greedy", GREEDY))
            for name in (f"{key}_task_{task_id}",)
            for of_task in ([name] if name in first and name in last else [key])
        ]
        for task_id in run.settings["task_ids"]
    }


def changed_settings(run: StoredRun) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The preset that a run started from, and the fields in which it differs: name -> (preset, run).

    Raises BadInput where there is no such preset.
    """
    preset = preset_of(run.provenance["argv"])
    if preset not in PRESETS:
        raise BadInput(f"{run.folder / 'config.json'}: argv starts from the preset {preset!r}, which does not exist")
    of_preset = _as_json(PRESETS[preset])
    changed = {
        name: (of_preset[name], value)
        for name, value in run.settings.items()
        if name in of_preset and value != of_preset[name]
    }
    return preset, changed


def settings_that_differ(runs: Sequence[StoredRun]) -> dict[str, list[Any]]:
    """Fields in which runs differ, with each run's value (None: unknown to it). Where they are kept does not count."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in NOT_SHOWN - {"seed"})
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _as_json(config: TrainConfig) -> dict[str, Any]:
    """All fields of a configuration, flat, after a trip through JSON (tuples are lists there)."""
    sections = json.loads(json.dumps(to_dict(config))).values()
    return {name: value for section in sections for name, value in section.items()}
