"""Read a run, finished or not, from its folder: its settings, its metrics, and what its training took."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from configs.config import TrainConfig, config_from_json
from contracts import BadInput, read_bytes, read_fields, resolve_pointer
from experiment.provenance import Provenance

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "train.log"

GREEDY = "eval/student_success"  # every evaluation has it
WALL_TIME = ("rollout/time_s", "time/update", "time/eval", "time/checkpoint")

MetricsRow: TypeAlias = dict[str, float]  # global_step, update and metrics


class RunDescription(Provenance, total=False):
    """The contents of config.json: the provenance, and what decides the result of the run."""

    config: dict[str, dict[str, object]]  # settings by section: see configs.config.config_from_json
    looks: str  # name and digest of the assets
    hub_commit: str | None  # of the checkpoint, if it came from the hub
    ranks: int  # processes that train together
    resume_argv: list[list[str]]  # the command lines that resumed the run; missing if none did


@dataclass(frozen=True)
class StoredRun:
    """The contents of a run folder."""

    folder: Path
    config: TrainConfig
    rows: Sequence[MetricsRow]  # of metrics.jsonl
    description: RunDescription

    @property
    def evaluated_steps(self) -> list[int]:
        """The env steps of its evaluations, oldest first."""
        return [int(row["global_step"]) for row in self.rows if GREEDY in row]

    @property
    def is_finished(self) -> bool:
        """Whether the run has had its last evaluation."""
        return self.evaluated_steps[-1:] >= [self.config.phases.total_steps]

    def status(self) -> str:
        """How far the run has come, in one line."""
        state = "Finished" if self.is_finished else "Not finished"
        env_steps = self.rows[-1]["global_step"] if self.rows else 0
        planned = "" if self.is_finished else f" of {self.config.phases.total_steps:,}"
        updates = sum("schedule/phase" in row for row in self.rows)
        return f"{state}: {env_steps:,}{planned} env steps, {updates} updates, {hours(self.rows):.1f} h"


def read_run(folder: Path) -> StoredRun:
    """Read a run folder. Raises BadInput if it is not one, is damaged, or has settings of another version."""
    try:
        description = read_description(folder)
        config = config_from_json(description.get("config"))
        rows = read_metrics(folder / METRICS_FILE)
    except BadInput as problem:
        raise BadInput(f"{folder} is not a run folder of this version: {problem}") from None
    return StoredRun(folder.resolve(), config, rows, description)


def read_description(folder: Path) -> RunDescription:
    """Read the config.json of a run folder. Raises BadInput."""
    return read_fields(folder / CONFIG_FILE, RunDescription)


def read_metrics(path: Path) -> list[MetricsRow]:
    """Read the records of a metrics.jsonl. Raises BadInput if there is none, or if a record is damaged.

    Values that were not finite (null in the file) are left out, and so is a last line that a kill has cut.
    """
    *lines, _ = read_bytes(path).split(b"\n")  # a whole last line ends with a newline, too
    try:
        records = [json.loads(line) for line in lines]
        return [{key: value for key, value in record.items() if value is not None} for record in records]
    except (ValueError, AttributeError) as error:
        raise BadInput(f"{path} is damaged: {error}") from None


def hours(rows: Sequence[MetricsRow]) -> float:
    """Wall time of rollouts, updates, evaluations and checkpoints, in hours."""
    return sum(row.get(key, 0.0) for row in rows for key in WALL_TIME) / 3600


class Training(RunDescription):
    """The time and memory that the training of a checkpoint took, and the config.json of its run."""

    run: str  # name of the run folder
    env_steps: int
    hours: float  # wall time
    gpu_hours: float  # wall time times the number of GPUs
    peak_gpu_gib: float  # peak of tensors on one GPU


def read_training(checkpoint: Path) -> Training | None:
    """What the training of a checkpoint took up to its env step; None if the checkpoint is not in a run folder.

    `checkpoint` may be a pointer, such as `checkpoints/best`. Raises BadInput if the run folder is damaged.
    """
    checkpoint = resolve_pointer(checkpoint).resolve()
    step = checkpoint.name.removeprefix("step_")
    run_folder = checkpoint.parent.parent
    if not step.isdigit() or not (run_folder / METRICS_FILE).is_file():
        return None
    description = read_description(run_folder)
    rows = [row for row in read_metrics(run_folder / METRICS_FILE) if row["global_step"] <= int(step)]
    has_gpu = bool(description["machine"]["gpus"]) and description["config"]["model"]["device"] != "cpu"
    num_gpus = description["ranks"] if has_gpu else 0
    return {
        "run": run_folder.name,
        "env_steps": int(step),
        "hours": hours(rows),
        "gpu_hours": hours(rows) * num_gpus,
        "peak_gpu_gib": max((row.get("system/gpu_mem_gb", 0.0) for row in rows), default=0.0),
        **description,
    }


def was_trained_on(
    training: Training, task_suite: str, task_id: int, init_state_id: int, bddl_file: str | None = None
) -> bool:
    """Whether training used this numbered initial state of the task. `fresh` initial states have no numbers.

    bddl_file: the user's own task, which has the ids of the suite's first task; None: the suite's task itself.
    """
    task = training["config"]["task"]
    states = task["train_init_states"]  # "fresh", or [first, one past last]
    own_task = training["config"]["simulator"]["bddl_file"]
    if not isinstance(states, list) or not _is_same_file(cast("str | None", own_task), bddl_file):
        return False
    first, end = states
    is_same_task = task_suite == task["task_suite"] and task_id in cast(list[int], task["task_ids"])
    return is_same_task and first <= init_state_id < end


def _is_same_file(one: str | None, other: str | None) -> bool:
    """Whether two settings name the same file, or both none."""
    if one is None or other is None:
        return one == other
    return Path(one).resolve() == Path(other).resolve()
