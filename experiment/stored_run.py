"""Read a run, finished or not, from its folder: its evaluations, its change of success, and its training time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

from configs.sections import PhaseConfig, TaskConfig
from contracts import BadInput, resolve_pointer
from experiment.run_files import (
    CONFIG_FILE,
    METRICS_FILE,
    MetricsRow,
    RunDescription,
    read_description,
    read_metrics,
    read_outcomes,
)
from experiment.statistics import Paired, Successes, compare
from json_fields import read_fields

TEACHER = "eval/teacher_success"
GREEDY = "eval/student_success"
SAMPLED = "eval/student_sampled_success"
WALL_TIME = ("rollout/time_s", "time/update", "time/eval", "time/checkpoint")

EpisodeOutcomes: TypeAlias = dict[tuple[int, int, int], bool]  # (task, initial state, trial) -> success


@dataclass(frozen=True)
class StoredRun:
    """The contents of a run folder."""

    folder: Path
    rows: Sequence[MetricsRow]  # of metrics.jsonl
    description: RunDescription
    phases: PhaseConfig

    @property
    def evaluations(self) -> list[MetricsRow]:
        """The rows of metrics.jsonl that hold an evaluation, oldest first."""
        return [row for row in self.rows if GREEDY in row]

    @property
    def best_evaluation(self) -> MetricsRow:
        """The evaluation with the highest success rate of the greedy student; the first one of equals.

        `--best-by evaluation` chooses checkpoints/best in the same way. Raises ValueError without an evaluation.
        """
        return max(self.evaluations, key=lambda row: row[GREEDY])

    def successes_in(self, row: MetricsRow, metric: str) -> Successes:
        """The successes of an actor in an evaluation. Raises BadInput."""
        k = row.get(f"{metric}_k", -1)
        n = row.get(f"{metric}_n", 0)
        if not 0 <= k <= n or n == 0:
            path = self.folder / METRICS_FILE
            raise BadInput(f"{path} is damaged: at step {row['global_step']} {metric} is {k} of {n}")
        return Successes(int(k), int(n))

    @property
    def is_finished(self) -> bool:
        """Whether the run has had its last evaluation."""
        evaluations = self.evaluations
        return bool(evaluations) and evaluations[-1]["global_step"] >= self.phases.total_steps

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
class _Settings:
    """The settings of a run that are read again."""

    phases: PhaseConfig
    task: TaskConfig
    simulator: _SimulatorSettings = field(default_factory=_SimulatorSettings)


def read_run(folder: Path) -> StoredRun:
    """Read a run folder. Raises BadInput if it is not one, or is damaged."""
    try:
        settings = read_fields(folder / CONFIG_FILE, _Settings, part="config")
        rows = read_metrics(folder / METRICS_FILE)
        description = read_description(folder)
    except BadInput as problem:
        raise BadInput(f"{folder} is not a run folder: {problem}") from None
    return StoredRun(folder.resolve(), rows, description, settings.phases)


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


class Change(NamedTuple):
    """A line of the table of results: two success rates and their difference on the same episodes."""

    label: str
    before: Successes
    after: Successes
    paired: Paired | None = None  # None if the outcomes of the episodes were not kept

    def __str__(self) -> str:
        difference = f"; on the same episodes {self.paired}" if self.paired else ""
        return f"{self.label}: {self.before} before, {self.after} after{difference}"


def changes(run: StoredRun) -> list[Change]:
    """The changes of success from the first to the last evaluation; empty unless there are two.

    First come the sampled student, the greedy student, and the greedy student compared with its teacher, unless the
    student began as that teacher. With several tasks, the student on each task follows.
    """
    if len(run.evaluations) < 2:
        return []
    on_all_tasks = []
    by_task = []
    for label, metric in (("student, sampled", SAMPLED), ("student, greedy", GREEDY)):
        if f"{metric}_k" in run.evaluations[0]:  # without --eval-trials nothing was sampled
            on_all_tasks.append(_change(run, label, metric, metric))
            by_task += _changes_by_task(run, label, metric)
    from_teacher = _change(run, "teacher, then greedy student", TEACHER, GREEDY)
    if from_teacher[1:] != on_all_tasks[-1][1:]:  # they differ in more than their labels
        on_all_tasks.append(from_teacher)
    return on_all_tasks + by_task


def trained_changes(run: StoredRun) -> list[Change]:
    """The changes from the policy that the run was given, sampled and greedy; empty without an evaluation.

    The run was given its own teacher, unless --teacher names another policy.
    """
    if not run.evaluations:
        return []
    given = TEACHER if run.phases.teacher_checkpoint is None else GREEDY
    greedy = _change(run, "greedy", given, GREEDY)
    if f"{SAMPLED}_k" not in run.evaluations[0]:  # --eval-trials 0
        return [greedy]
    return [_change(run, "sampled", SAMPLED, SAMPLED), greedy]


def _change(run: StoredRun, label: str, metric_before: str, metric_after: str) -> Change:
    """The change from an actor in the first evaluation to an actor in the last one."""
    first = run.evaluations[0]
    last = run.evaluations[-1]
    before = _successes_by_episode(run, first, metric_before)
    pairs = compare(before, _successes_by_episode(run, last, metric_after))
    paired = pairs if pairs.n > 0 else None
    return Change(label, run.successes_in(first, metric_before), run.successes_in(last, metric_after), paired)


def _changes_by_task(run: StoredRun, label: str, metric: str) -> list[Change]:
    """One line for each task; none unless both evaluations have episodes of several tasks."""
    before = _successes_by_episode(run, run.evaluations[0], metric)
    after = _successes_by_episode(run, run.evaluations[-1], metric)
    task_ids = sorted({task_id for task_id, _, _ in before.keys() & after.keys()})
    if len(task_ids) <= 1:
        return []
    lines = []
    for task_id in task_ids:
        task_outcomes = {episode: success for episode, success in before.items() if episode[0] == task_id}
        pairs = compare(task_outcomes, after)
        lines.append(Change(f"task {task_id}, {label}", pairs.before, pairs.after, pairs))
    return lines


def _successes_by_episode(run: StoredRun, evaluation: MetricsRow, metric: str) -> EpisodeOutcomes:
    """Whether every episode of an actor succeeded in an evaluation; empty if the run has no file of outcomes."""
    actor = metric.removeprefix("eval/").removesuffix("_success")
    outcomes = read_outcomes(run.folder, int(evaluation["global_step"])).get(actor, [])
    return {(outcome.task_id, outcome.init_state_id, outcome.trial): outcome.success for outcome in outcomes}
