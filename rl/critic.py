"""The critic variant (`--advantage gae`): a value head on the policy's hidden state. The default path never runs it.

Dimension key: N decisions of the rollout, B of a micro-batch, A action tokens of a chunk, H hidden width of the LLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rl.losses import ADVANTAGE_LIMIT
from rl.ranks import ALONE, Ranks
from rl.trajectory import Batch, Trajectory

if TYPE_CHECKING:
    from vla.policy import Policy

WIDTH = 256


class ValueHead(nn.Module):
    """Expected return of an observation, from the mean hidden state over the chunk's action positions."""

    def __init__(self, hidden_dim: int, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first, last = nn.Linear(hidden_dim, WIDTH), nn.Linear(WIDTH, 1)
        nn.init.zeros_(last.weight)  # the first values are 0: no advantage comes from noise
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(nn.LayerNorm(hidden_dim), first, nn.Tanh(), last)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, A, H) hidden states -> (B,) values."""
        return self.net(hidden.float().mean(dim=1)).squeeze(-1)


def predict_values(
    policy: Policy, critic: ValueHead, batch: Batch, micro_batch_size: int, ranks: Ranks = ALONE
) -> Tensor:
    """(N,) values of the rollout's observations before the update."""

    @torch.no_grad()
    def values_of(rows: Tensor) -> Tensor:
        hidden = (policy.chunk_outputs(micro.observations)[1] for micro in batch[rows].split(micro_batch_size))
        return torch.cat([critic(states) for states in hidden]).cpu()

    return ranks.divide(len(batch), values_of)


def gae(values: Tensor, batch: Batch, trajectories: Sequence[Trajectory], discount: float, gae_lambda: float) -> Tensor:
    """(N,) generalised advantage estimates (Schulman et al. 2016, eq. 16); one decision is one time step.

    delta_t = r_t + discount * V_{t+1} - V_t with the sparse reward on the last decision and V = 0 behind it: an episode
    that reaches its cap has failed for good. A_t = sum over k of (discount * lambda)^k delta_{t+k}.
    """
    advantages = torch.zeros_like(values)
    for row in reversed(range(len(values))):
        if batch.steps_to_end[row] == 0:
            advantages[row] = float(trajectories[int(batch.trajectory[row])].success) - values[row]
        else:
            delta = discount * values[row + 1] - values[row]
            advantages[row] = delta + discount * gae_lambda * advantages[row + 1]
    return advantages.clamp(-ADVANTAGE_LIMIT, ADVANTAGE_LIMIT)


def value_loss(predicted: Tensor, micro: Batch, clip: float) -> Tensor:
    """Sum of half the larger of the squared errors with and without clipping the change of the value to +-clip."""
    assert micro.values is not None, "rl.update.estimate_advantages fills them"
    assert micro.advantages is not None
    old, target = micro.values, micro.advantages + micro.values
    bounded = old + (predicted - old).clamp(-clip, clip)
    return (0.5 * torch.maximum((predicted - target) ** 2, (bounded - target) ** 2)).sum()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; 0 for constant returns."""
    variance = returns.var(unbiased=False)
    return 0.0 if variance == 0 else (1 - (returns - values).var(unbiased=False) / variance).item()
