"""A run folder read back: its records, its settings, its evaluations. Everything that reports show comes from here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.cli import preset_of
from configs.config import PhaseConfig, TrainConfig, to_dict
from configs.presets import PRESETS
from errors import BadInput
from rl.evaluation import Successes
from rl.evaluation_files import read_episodes
from rl.paired import Paired, count_pairs
from rl.phases import last_step
from rl.run import read_metrics

TEACHER, GREEDY, SAMPLED = "eval/teacher_success", "eval/student_success", "eval/student_sampled_success"
NOT_SHOWN = {"name", "output", "seed", "keep_checkpoints", "wandb_mode", "wandb_project", "tensorboard", "rerun"}

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
        stored = json.loads(path.read_text())
        sections = stored.pop("config").values()
        settings = {name: value for section in sections for name, value in section.items()}
        rows = read_metrics(folder)
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise BadInput(
            f"{folder} is not a run folder ({error}): name a folder with config.json and metrics.jsonl, such as "
            "runs/RUN"
        ) from None
    return StoredRun(folder, rows, settings, stored)


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
            for of_task in ([f"{key}_task_{task_id}"] if f"{key}_task_{task_id}" in last else [key])
        ]
        for task_id in run.settings["task_ids"]
    }


def changed_settings(run: StoredRun) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The preset that a run started from, and the fields in which it differs: name -> (preset, run)."""
    preset = preset_of(run.provenance["argv"])
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
