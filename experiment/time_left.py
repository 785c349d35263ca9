"""Say how long the rest of a run takes, if it goes on as fast as its last update."""

import math

from configs.config import TrainConfig
from experiment.checkpoints import TrainerState
from experiment.evaluation import evaluation_steps
from rl.rollout import Rollout


def time_left(
    config: TrainConfig, state: TrainerState, rollout: Rollout, update_s: float, episode_s: float
) -> float:
    """Seconds to the end of the run.

    `update_s`: of the last update and its rollout. `episode_s`: of an episode of the last evaluation; 0 before there
    was one, which leaves evaluations out.
    """
    steps_left = max(0, config.phases.total_steps - state.global_step)
    updates_left = math.ceil(steps_left / rollout.env_steps)  # the last rollout is as long as the others
    evaluated_at = -1 if state.evaluated_at is None else state.evaluated_at
    evaluations_left = sum(step > evaluated_at for step in evaluation_steps(config))
    first_state, end_state = config.task.eval_init_states
    starts = len(config.task.task_ids) * (end_state - first_state)
    episodes = starts * (1 + config.evaluation.eval_trials)
    return updates_left * update_s + evaluations_left * episodes * episode_s
