"""Settings of what the policy experiences: tasks, rollouts, evaluations. See configs/config.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from configs.require import require

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]


@dataclass(frozen=True)
class TaskConfig:
    """What is trained on, and in which simulator."""

    task_suite: Suite = "libero_spatial"
    """LIBERO suite that the tasks belong to."""
    task_ids: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--task-id"])] = (0,)
    """Task ids within the suite; several ids train one policy on all of them."""
    bddl_file: str | None = None
    """A BDDL file of your own in place of a task of the suite (None: the suite's tasks)."""
    train_init_states: tuple[int, int] = (0, 40)
    """First and one-past-last of the benchmark's initial states that training may use."""
    eval_init_states: tuple[int, int] = (40, 50)
    """First and one-past-last of the initial states that evaluation uses (0 50: the published protocol)."""
    max_env_steps: int | None = None
    """Episode cap in env steps (None: the suite's; spatial 220, object 280, goal 300, 10: 520, 90: 400)."""
    num_envs: int = 1
    """Simulators (of each rank): 1 steps inline in this process, N > 1 run in worker processes."""
    assets: str = "lowpoly"
    """What objects look like: `lowpoly` (ours, no download), `official`, or a folder; the environment variable
    LIBERO_ASSETS names a folder in place of lowpoly."""

    def __post_init__(self) -> None:
        require(len(self.task_ids) > 0, "--task-ids needs at least one task id")
        require(len(set(self.task_ids)) == len(self.task_ids), f"--task-ids names a task twice: {self.task_ids}")
        require(self.num_envs >= 1, f"--num-envs must be at least 1, got {self.num_envs}")
        require(
            self.max_env_steps is None or self.max_env_steps >= 1,
            f"--max-env-steps must be at least 1, got {self.max_env_steps}",
        )
        for flag, (first, end) in (
            ("--train-init-states", self.train_init_states),
            ("--eval-init-states", self.eval_init_states),
        ):
            require(0 <= first < end, f"{flag} must be FIRST END with 0 <= FIRST < END, got {first} {end}")


@dataclass(frozen=True)
class RolloutConfig:
    """How much experience an update learns from."""

    n_steps: int = 512
    """Env steps of a rollout, over all ranks: new episodes start until it is reached, running ones finish."""
    group_size: int = 1
    """Episodes from each drawn (task, initial state)."""
    dynamic_sampling: bool = False
    """Drop groups whose success rate lies outside --group-success-bounds and collect others in their place."""
    group_success_bounds: tuple[float, float] = (0.1, 0.9)
    """Lowest and highest success rate, 0 to 1, of a group that dynamic sampling keeps."""
    max_extra_steps: int = 2_048
    """Env steps per update that dynamic sampling may spend beyond --n-steps (a group that has started is finished)."""
    max_batch: int | None = None
    """Observations that the policy decides on together at most (None: all that wait); fewer need less memory."""
    patience_ms: float = 0.0
    """Milliseconds that a batch waits for simulators about to be ready. 0: whatever is ready is decided at once."""

    def __post_init__(self) -> None:
        require(self.n_steps >= 1, f"--n-steps must be at least 1, got {self.n_steps}")
        require(self.group_size >= 1, f"--group-size must be at least 1, got {self.group_size}")
        require(self.max_extra_steps >= 0, f"--max-extra-steps must not be negative, got {self.max_extra_steps}")
        require(self.max_batch is None or self.max_batch >= 1, f"--max-batch must be at least 1, got {self.max_batch}")
        require(self.patience_ms >= 0, f"--patience-ms must not be negative, got {self.patience_ms}")
        low, high = self.group_success_bounds
        require(0 <= low <= high <= 1, f"--group-success-bounds must satisfy 0 <= LOW <= HIGH <= 1, got {low} {high}")


@dataclass(frozen=True)
class CurriculumConfig:
    """Which of several tasks is practised."""

    curriculum: bool = False
    """Prefer tasks that succeed about half of the time (else tasks take turns)."""
    curriculum_alpha: float = 0.9
    """Weight of the past in each task's exponential average of successes, 0 to 1, per episode."""
    curriculum_temperature: float = 0.2
    """Distance from 50 % success, as a success rate, that makes a task e times rarer (small: a strong preference)."""
    curriculum_floor: float = 0.2
    """Share of the sampling, 0 to 1, that stays uniform over the tasks."""

    def __post_init__(self) -> None:
        require(0 <= self.curriculum_alpha < 1, f"--curriculum-alpha must lie in [0, 1), got {self.curriculum_alpha}")
        require(
            self.curriculum_temperature > 0,
            f"--curriculum-temperature must be positive, got {self.curriculum_temperature}",
        )
        require(0 <= self.curriculum_floor <= 1, f"--curriculum-floor must lie in [0, 1], got {self.curriculum_floor}")


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation of teacher and student on held-out initial states."""

    eval_interval: int = 5_000
    """Env steps between evaluations (also at step 0 and at the end)."""
    eval_trials: int = 1
    """Sampled episodes per task and held-out initial state; greedy ones are played once, as they repeat themselves."""
    allow_zero_baseline: bool = False
    """Go on when the policy that acts first has no success in the first evaluation."""
    stop_if_below_baseline: bool = False
    """Stop, with the best checkpoint restored, when the student's success in an evaluation lies below that of the first
    one by more than chance (its 95 % interval ends below the first rate)."""
    max_updates_without_signal: int = 10
    """Stop after so many policy-gradient updates in a row without a single non-zero advantage."""
    best_by: Literal["evaluation", "return"] = "evaluation"
    """What `checkpoints/best` maximises: the lower bound of the student's evaluated success, or the exponential
    average (alpha 0.99) of the episodic return."""

    def __post_init__(self) -> None:
        require(self.eval_interval >= 1, f"--eval-interval must be at least 1, got {self.eval_interval}")
        require(self.eval_trials >= 1, f"--eval-trials must be at least 1, got {self.eval_trials}")
        require(
            self.max_updates_without_signal >= 1,
            f"--max-updates-without-signal must be at least 1, got {self.max_updates_without_signal}",
        )
