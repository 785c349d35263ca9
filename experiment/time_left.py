"""Say how long the rest of a run takes, if it goes on as fast as its last update."""

import math

from configs.config import TrainConfig
from experiment.checkpoints import TrainerState
from experiment.evaluation import evaluation_steps
from rl.rollout import Rollout


def time_left(
    config: TrainConfig, state: TrainerState, rollout: Rollout, update_s: float, episode_s: float | None
) -> float:
    """Seconds to the end of the run, evaluations included.

    `update_s`: of the last update and its rollout. `episode_s`: of an episode of the last evaluation; None if there was
    none, and the episodes of the rollout are taken for it.
    """
    if episode_s is None:
        episode_s = rollout.wall_s / len(rollout.trajectories)
    steps_left = max(0, config.phases.total_steps - state.global_step)
    updates_left = math.ceil(steps_left / rollout.env_steps)  # the last rollout is as long as the others
    return updates_left * update_s + evaluation_episodes_left(config, state) * episode_s


def evaluation_episodes_left(config: TrainConfig, state: TrainerState) -> int:
    """How many episodes the student's evaluations in the rest of a run play at most.

    An evaluation takes place after the rollout that reaches its env step, and one is enough for all that are due then.
    """
    evaluated_at = -1 if state.evaluated_at is None else state.evaluated_at
    missing_steps = [step - state.global_step for step in evaluation_steps(config) if step > evaluated_at]
    after_rollouts = {math.ceil(max(0, missing) / config.rollout.n_steps) for missing in missing_steps}
    first_state, end_state = config.task.eval_init_states
    starts = len(config.task.task_ids) * (end_state - first_state)
    return len(after_rollouts) * starts * (1 + config.evaluation.eval_trials)
