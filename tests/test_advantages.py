"""Advantages against closed forms and slow sums."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.sections import LossConfig
from rl.advantages import (
    estimate_advantages,
    relative_returns,
    trajectory_weights,
)
from rl.trajectory import flatten, token_weights
from tests.fakes import ACTION_DIM, trajectory

outcomes = st.lists(st.booleans(), min_size=1, max_size=24)


def advantages(kind, successes) -> np.ndarray:
    """Of every decision of trajectories of one decision each, all in one group and of one task."""
    played = [trajectory(1, bool(success), 0, i) for i, success in enumerate(successes)]
    config = LossConfig(advantage=kind)
    return relative_returns(flatten(played, ACTION_DIM), played, config).numpy()


@given(outcomes)
def test_relative_advantages_follow_their_closed_forms(successes):
    returns = np.array(successes, dtype=np.float64)
    spread = returns.std(ddof=1) if len(set(successes)) > 1 else math.inf
    scores = pytest.approx((returns - returns.mean()) / (spread + 1e-6), rel=1e-4, abs=1e-6)
    assert advantages("group", successes) == scores
    assert advantages("batch", successes) == scores
    if len(set(successes)) == 1:  # exactly 0: such decisions never run
        assert not any(advantages(kind, successes).any() for kind in ("group", "batch"))


def test_batch_advantages_compare_episodes_of_the_same_task():
    task_ids = [0, 0, 1, 1, 1, 1]
    played = [trajectory(1, success, i, i) for i, success in enumerate([1, 1, 1, 0, 1, 1])]
    for one, task_id in zip(played, task_ids, strict=True):
        one.episode = replace(one.episode, task_id=task_id)
    values = relative_returns(flatten(played, ACTION_DIM), played, LossConfig(advantage="batch"))
    spread = math.sqrt((3 * 0.25**2 + 0.75**2) / 5)
    assert values.tolist() == pytest.approx(
        [0, 0, 0.25 / spread, -0.75 / spread, 0.25 / spread, 0.25 / spread], rel=1e-4
    )


def test_magnitudes_are_clamped_to_10():
    values = advantages("group", [1] + [0] * 399)  # (1 - 1/400) / 0.05 = 19.95 without the clamp
    assert values.max() == 10
    assert values.min() == pytest.approx(-0.05, abs=1e-3)


# weights


def test_weights_make_the_mean_over_executed_tokens_of_the_rollout_or_of_each_trajectory():
    batch = flatten(
        [trajectory(1), trajectory(4, last_executed=1), trajectory(7, last_executed=3)], ACTION_DIM
    )
    x = torch.rand(batch.executed.shape, generator=torch.Generator().manual_seed(0))  # of each token
    decision_means = torch.stack([row[on].mean() for row, on in zip(x, batch.executed, strict=True)])
    of_trajectories = [batch.trajectory == i for i in range(3)]
    trajectory_means = torch.stack([x[rows][batch.executed[rows]].mean() for rows in of_trajectories])
    for weights, expected in (
        (token_weights(batch.executed), x[batch.executed].mean()),
        (trajectory_weights(batch), trajectory_means.mean()),
    ):
        assert (weights * decision_means).mean().item() == pytest.approx(expected.item(), rel=1e-6)
        assert weights.mean().item() == pytest.approx(1)  # so the learning rate keeps its meaning


@pytest.mark.parametrize("kind", ["group", "batch", "gae"])
def test_long_failures_do_not_outweigh_short_successes_where_episodes_are_compared(kind):
    """gae has no critic in its first update, and takes the advantages of batch: with their weights, too."""
    played = [trajectory(2, True, 0, 0), trajectory(2, True, 0, 1), trajectory(6, False, 0, 2)]
    batch = estimate_advantages(flatten(played, ACTION_DIM), played, None, LossConfig(advantage=kind))
    assert (batch.weights * batch.advantages).mean().item() == pytest.approx(0, abs=1e-6)
