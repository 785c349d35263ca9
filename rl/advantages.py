"""Advantages: by how much PPO should make each decision more likely (positive) or less likely (negative).

Dimension key: N decisions of the rollout, M trajectories. The reward is sparse: a trajectory's return R is 1 at
success, else 0. docs/HOW_IT_WORKS.md compares the kinds of advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from configs.sections import LossConfig
from rl.trajectory import Batch, Trajectory

EPSILON = 1e-6  # keeps the division by a standard deviation finite
ADVANTAGE_LIMIT = 10.0  # |A| is clamped to this


def estimate_advantages(
    batch: Batch, trajectories: Sequence[Trajectory], values: Tensor | None, config: LossConfig
) -> Batch:
    """Fill in the batch's advantages as `--advantage` says, and the weights that suit them.

    values (N,): the critic's, with `--advantage gae`. In the first rollout it has none, and the advantages are those of
    `--advantage batch`.

    Where trajectories are compared with one another, all of them have the same weight. Failed episodes are longer, and
    would dominate a mean over tokens: at 65 % success the mean advantage would be about -0.5 in place of 0.
    """
    if values is not None:
        return replace(batch, advantages=gae(values, batch, trajectories, config.gae_lambda))
    if config.advantage == "gae":
        config = replace(config, advantage="batch")
    advantages = relative_returns(batch, trajectories, config)
    weights = batch.weights if config.advantage == "absolute" else trajectory_weights(batch)
    return replace(batch, advantages=advantages, weights=weights)


def trajectory_weights(batch: Batch) -> Tensor:
    """The weights (N,) of the decisions, with mean 1, that give the same weight to all trajectories.

    Within a trajectory they are proportional to the executed tokens, as those of `rl.trajectory.token_weights`.
    """
    tokens = batch.executed.sum(-1)  # (N,) executed tokens of each decision
    trajectory_tokens = torch.bincount(batch.trajectory, tokens)  # (M,)
    # Those of a trajectory add up to N here; divided by the number of trajectories, all together do.
    weights = tokens * len(batch) / trajectory_tokens[batch.trajectory]
    return (weights / len(trajectory_tokens)).float()


def relative_returns(batch: Batch, trajectories: Sequence[Trajectory], config: LossConfig) -> Tensor:
    """The advantages (N,) computed from returns alone, without a critic; those of a trajectory's decisions are equal.

    absolute: the trajectory's return. Failed episodes have advantage 0, so they give no gradient and cost no compute.
    It is the default because it is the guide's (configs/presets.py), needs neither groups nor a baseline, and is never
    negative: negative advantages are what can make a policy collapse. Its price: at a success rate p the gradient has
    1 / (1 - p) times the variance of one with a mean baseline, 4 times at 75 %.
    group (GRPO) and batch: the trajectory's return compared with those of other trajectories.
    """
    returns = torch.tensor([float(trajectory.success) for trajectory in trajectories])  # (M,)
    if config.advantage == "absolute":
        advantages = returns
    elif config.advantage == "group":
        # A group has one task and one initial state.
        groups = torch.tensor([trajectory.episode.group for trajectory in trajectories])  # (M,)
        advantages = by_group(standardised, returns, groups)
    else:
        # With one mean over all tasks every episode of an easy task would look good. A mean over n episodes contains
        # each of them, which shrinks the expected gradient by a factor of 1 - 1/n.
        task_ids = torch.tensor([trajectory.episode.task_id for trajectory in trajectories])  # (M,)
        advantages = scaled(by_group(centred, returns, task_ids))
    return advantages[batch.trajectory].clamp(-ADVANTAGE_LIMIT, ADVANTAGE_LIMIT)


def by_group(transform: Callable[[Tensor], Tensor], values: Tensor, groups: Tensor) -> Tensor:
    """Apply `transform` to the values (N,) of each group: to those with the same number in `groups` (N,)."""
    transformed = torch.empty_like(values)
    for group in groups.unique():
        is_member = groups == group
        transformed[is_member] = transform(values[is_member])
    return transformed


def centred(values: Tensor) -> Tensor:
    """Values minus their mean."""
    return values - values.mean()


def standardised(returns: Tensor) -> Tensor:
    """A_i = (R_i - mean) / (std + 1e-6), unbiased std; exactly 0 when all are equal (GRPO, Shao et al. 2024, eq. 3)."""
    if bool((returns == returns[0]).all()):
        return torch.zeros_like(returns)
    return scaled(centred(returns))


def scaled(values: Tensor) -> Tensor:
    """Centred values divided by their unbiased standard deviation + 1e-6; 0 for a single value."""
    if len(values) < 2:
        return torch.zeros_like(values)
    return values / (values.std() + EPSILON)


def gae(values: Tensor, batch: Batch, trajectories: Sequence[Trajectory], gae_lambda: float) -> Tensor:
    """Generalised advantage estimates (N,) (Schulman et al. 2016, eq. 16), standardised over the rollout.

    One decision is one time step: delta_t = r_t + V_{t+1} - V_t, and A_t = sum over k of lambda^k delta_{t+k}. There is
    no discount, because the critic predicts the undiscounted return. The sparse reward comes with the last decision. V
    after that is 0, also where an episode reached its step cap: the episode counts as failed, so nothing is
    bootstrapped.
    """
    advantages = torch.zeros_like(values)
    for row in reversed(range(len(values))):
        is_last = batch.steps_to_end[row] == 0
        if is_last:
            reward = float(trajectories[int(batch.trajectory[row])].success)
            advantages[row] = reward - values[row]
        else:
            delta = values[row + 1] - values[row]
            advantages[row] = delta + gae_lambda * advantages[row + 1]
    return standardised(advantages).clamp(-ADVANTAGE_LIMIT, ADVANTAGE_LIMIT)
