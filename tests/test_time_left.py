"""The time left: updates at the pace of the last one, and the evaluations that are still due."""

import pytest

from configs.config import TrainConfig, changed
from experiment.checkpoints import TrainerState
from experiment.time_left import time_left
from rl.rollout import Rollout
from tests.fakes import trajectory

CONFIG = changed(
    TrainConfig(),
    total_steps=32_000,
    n_steps=1_000,
    warmup_steps=4_000,
    eval_init_states=(40, 50),
    eval_trials=1,
    eval_interval=10_000,
)
ROLLOUT = Rollout([trajectory(250)] * 2, {}, wall_s=40.0, errors=0)  # 2,000 env steps


@pytest.mark.parametrize(
    ("global_step", "episode_s", "updates_s", "evaluations_s"),
    [
        (23_000, 3.0, 5 * 300.0, 2 * 20 * 3.0),  # evaluations at 30,000 and 32,000
        (23_000, 0.0, 5 * 300.0, 0.0),  # no evaluation yet
        (32_000, 3.0, 0.0, 20 * 3.0),  # the last evaluation
    ],
)
def test_the_time_left_counts_updates_and_evaluations(global_step, episode_s, updates_s, evaluations_s):
    evaluated_at = 20_000 if global_step < 32_000 else 30_000
    state = TrainerState(global_step=global_step, evaluated_at=evaluated_at)
    assert time_left(CONFIG, state, ROLLOUT, 300.0, episode_s) == pytest.approx(updates_s + evaluations_s)
