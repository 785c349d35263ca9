"""Read a run, finished or not, from its folder: its metrics, its settings, and what its training took."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from configs.sections import PhaseConfig, TaskConfig
from contracts import BadInput, read_fields, resolve_pointer
from experiment.run_files import (
    CONFIG_FILE,
    METRICS_FILE,
    MetricsRow,
    RunDescription,
    read_description,
    read_metrics,
)

GREEDY = "eval/student_success"  # every evaluation has it
WALL_TIME = ("rollout/time_s", "time/update", "time/eval", "time/checkpoint")


@dataclass(frozen=True)
class StoredRun:
    """The contents of a run folder."""

    folder: Path
    rows: Sequence[MetricsRow]  # of metrics.jsonl
    description: RunDescription
    phases: PhaseConfig
    advantage: str = "absolute"  # --advantage

    @property
    def evaluated_steps(self) -> list[int]:
        """The env steps of its evaluations, oldest first."""
        return [int(row["global_step"]) for row in self.rows if GREEDY in row]

    @property
    def is_finished(self) -> bool:
        """Whether the run has had its last evaluation."""
        return self.evaluated_steps[-1:] >= [self.phases.total_steps]

    def status(self) -> str:
        """How far the run has come, in one line."""
        state = "Finished" if self.is_finished else "Not finished"
        env_steps = self.rows[-1]["global_step"] if self.rows else 0
        planned = "" if self.is_finished else f" of {self.phases.total_steps:,}"
        updates = sum("schedule/phase" in row for row in self.rows)
        return f"{state}: {env_steps:,}{planned} env steps, {updates} updates, {hours(self.rows):.1f} h"


@dataclass
class _SimulatorSettings:
    bddl_file: str | None = None


@dataclass
class _LossSettings:
    advantage: str


@dataclass
class _Settings:
    """The settings of a run that are read again."""

    phases: PhaseConfig
    task: TaskConfig
    loss: _LossSettings
    simulator: _SimulatorSettings = field(default_factory=_SimulatorSettings)


def read_run(folder: Path) -> StoredRun:
    """Read a run folder. Raises BadInput if it is not one, or is damaged."""
    try:
        settings = read_fields(folder / CONFIG_FILE, _Settings, part="config")
        rows = read_metrics(folder / METRICS_FILE)
        description = read_description(folder)
    except BadInput as problem:
        raise BadInput(f"{folder} is not a run folder: {problem}") from None
    return StoredRun(folder.resolve(), rows, description, settings.phases, settings.loss.advantage)


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
    if not step.isdigit():
        return None
    run_folder = checkpoint.parent.parent
    if not (run_folder / METRICS_FILE).is_file():
        return None
    run = read_run(run_folder)
    rows = [row for row in run.rows if row["global_step"] <= int(step)]
    wall_clock = hours(rows)
    return {
        "run": run.folder.name,
        "env_steps": int(step),
        "hours": wall_clock,
        "gpu_hours": wall_clock * _num_gpus(run.description),
        "peak_gpu_gib": max((row.get("system/gpu_mem_gb", 0.0) for row in rows), default=0.0),
        **run.description,
    }


def was_trained_on(
    training: Training, task_suite: str, task_id: int, init_state_id: int, bddl_file: str | None = None
) -> bool:
    """Whether training used this numbered initial state of the task. `fresh` initial states have no numbers.

    bddl_file: the user's own task, which has the ids of the suite's first task; None: the suite's task itself.
    """
    bddl_file_of_run = cast("str | None", training["config"].get("simulator", {}).get("bddl_file"))
    if not _is_same_file(bddl_file_of_run, bddl_file):
        return False
    task = training["config"]["task"]
    states = task["train_init_states"]  # "fresh", or [first, one past last]
    if not isinstance(states, list):
        return False
    first, end = states
    is_same_task = task_suite == task["task_suite"] and task_id in cast(list[int], task["task_ids"])
    return is_same_task and first <= init_state_id < end


def _is_same_file(one: str | None, other: str | None) -> bool:
    """Whether two settings name the same file, or both none."""
    if one is None or other is None:
        return one == other
    return Path(one).resolve() == Path(other).resolve()


def _num_gpus(description: RunDescription) -> int:
    """The number of GPUs that trained: one for each rank, or 0 if the run was on a CPU."""
    has_gpu = bool(description["machine"]["gpus"])
    if not has_gpu or description["config"].get("model", {}).get("device") == "cpu":
        return 0
    return description.get("ranks", 1)
