"""Estimate how long a run takes, from the speed that was measured at its start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from configs.config import TrainConfig
from envs.tasks import TaskInfo
from experiment.checkpoints import TrainerState
from experiment.evaluation import evaluation_steps
from experiment.speed import Speed
from experiment.terminal import duration
from rl.phases import end_of_warmup
from rl.rollout import Rollout

# The share of RL's decisions that are assumed to have an advantage with --advantage absolute, which leaves out those of
# failed episodes. In four kinds of runs it was 0.35 to 0.69.
SUCCESSFUL_SHARE = 0.5


@dataclass(frozen=True)
class Cost:
    """Seconds that the rest of a run takes."""

    rollouts_s: float
    updates_s: float
    evaluations_s: float

    def __str__(self) -> str:
        return (
            f"about {duration(self.rollouts_s + self.updates_s + self.evaluations_s)} (rollouts "
            f"{duration(self.rollouts_s)}, updates {duration(self.updates_s)}, evaluations "
            f"{duration(self.evaluations_s)})"
        )


def estimate_cost(
    config: TrainConfig,
    tasks: Sequence[TaskInfo],
    speed: Speed,
    state: TrainerState,
    student_is_teacher: bool,
) -> Cost:
    """The cost of a run from `state` to its last env step.

    Rollouts are whole: the last one, too, plays --n-steps env steps. Two parts of the cost are upper bounds.
    Evaluations count every episode up to its step limit. Updates count every epoch, although --target-kl may end one
    early; with --advantage absolute they count SUCCESSFUL_SHARE of the decisions. At the end of a rollout every
    simulator waits for the last episode, on average for half of an episode's step limit.
    student_is_teacher: the first evaluation plays the two only once, because they are the same policy.
    """
    longest = max(task.max_env_steps for task in tasks)
    rollouts = sum(rollouts_left(config, state))
    steps_of_rank = rollouts * config.rollout.n_steps / state.ranks
    waiting_steps = rollouts * speed.num_envs * longest / 2
    step_s = seconds_per_env_step(speed, speed.simulator.step_s)
    episodes_of_rank = evaluation_episodes_left(config, state, student_is_teacher) / state.ranks
    exact_step_s = seconds_per_env_step(speed, speed.simulator.exact_step_s)
    reset_s = seconds_per_reset(speed)
    return Cost(
        rollouts_s=(steps_of_rank + waiting_steps) * step_s + steps_of_rank / longest * reset_s,
        updates_s=learned_env_steps(config, state) / state.ranks / speed.chunk_length * speed.learned_s,
        evaluations_s=episodes_of_rank * (longest * exact_step_s + reset_s),
    )


def time_left(
    config: TrainConfig, state: TrainerState, rollout: Rollout, update_s: float, episode_s: float | None
) -> float:
    """Seconds to the end of the run, evaluations included, if it goes on as fast as in the last update.

    `update_s`: of the last update and its rollout. `episode_s`: of an episode of the last evaluation; None if there was
    none, and the episodes of the rollout are taken for it.
    """
    if episode_s is None:
        episode_s = rollout.wall_s / len(rollout.trajectories)
    steps_left = max(0, config.phases.total_steps - state.global_step)
    episodes_left = evaluation_episodes_left(config, state, student_is_teacher=True)
    updates_left = math.ceil(steps_left / rollout.env_steps)  # the last rollout is as long as the others
    return updates_left * update_s + episodes_left * episode_s


def rollouts_left(config: TrainConfig, state: TrainerState) -> tuple[int, int]:
    """How many rollouts the rest of the warmup takes, and how many follow it. A phase ends with a whole rollout."""
    n_steps = config.rollout.n_steps
    total_steps = config.phases.total_steps
    warmup_end = min(end_of_warmup(config.phases), total_steps)
    in_warmup = math.ceil(max(0, warmup_end - state.global_step) / n_steps)
    after_warmup = math.ceil(max(0, total_steps - state.global_step - in_warmup * n_steps) / n_steps)
    return in_warmup, after_warmup


def learned_env_steps(config: TrainConfig, state: TrainerState) -> float:
    """The env steps from which the rest of a run learns, each counted once for every epoch."""
    in_warmup, after_warmup = rollouts_left(config, state)
    loss = config.loss
    leaves_out_failures = loss.advantage == "absolute" and loss.kl_coef == 0 and loss.entropy_coef == 0
    share = SUCCESSFUL_SHARE if leaves_out_failures else 1.0
    epochs = in_warmup * int(config.update.warmup_epochs) + after_warmup * config.update.n_epochs * share
    return epochs * config.rollout.n_steps


def seconds_per_env_step(speed: Speed, step_s: float) -> float:
    """Seconds of a rank for an env step, if `step_s` is what a simulator alone takes for one.

    In each round the policy decides for all simulators, then all of them play a chunk at the same time.
    """
    round_s = speed.decision_s + speed.chunk_length * step_s * _simulators_per_core(speed)
    return round_s / (speed.num_envs * speed.chunk_length)


def seconds_per_reset(speed: Speed) -> float:
    """Seconds of a rank for a reset; its simulators reset at the same time."""
    return speed.simulator.reset_s * _simulators_per_core(speed) / speed.num_envs


def _simulators_per_core(speed: Speed) -> float:
    return max(1.0, speed.num_envs / speed.cores)


def evaluation_episodes_left(config: TrainConfig, state: TrainerState, student_is_teacher: bool) -> int:
    """How many episodes the evaluations of the rest of a run play at most.

    An evaluation takes place after the rollout that reaches its env step, and one is enough for all that are due then.
    The teacher is played in the first one only.
    """
    is_first = state.evaluated_at is None
    evaluated_at = -1 if state.evaluated_at is None else state.evaluated_at
    missing_steps = [step - state.global_step for step in evaluation_steps(config) if step > evaluated_at]
    after_rollouts = {math.ceil(max(0, missing) / config.rollout.n_steps) for missing in missing_steps}
    first_state, end_state = config.task.eval_init_states
    starts = len(config.task.task_ids) * (end_state - first_state)
    episodes = len(after_rollouts) * starts * (1 + config.evaluation.eval_trials)
    return episodes + starts if is_first and not student_is_teacher else episodes
