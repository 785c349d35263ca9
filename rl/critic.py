"""The critic variant (`--advantage gae`): a value head on the policy's hidden state. The default path never runs it.

Dimension key: N decisions of the rollout, B of a micro-batch, A action tokens of a chunk, H hidden width of the LLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from configs.config import CriticConfig
from rl.contracts import Policy
from rl.losses import Statistics
from rl.objectives import Objective
from rl.ranks import ALONE, Ranks
from rl.trajectory import Batch, Trajectory
from transfer import send

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

    def values_of(rows: Tensor) -> Tensor:
        with torch.no_grad():
            parts = [
                critic(policy.chunk_outputs([batch.observations[i] for i in micro])[1])
                for micro in rows.split(micro_batch_size * len(policy.devices))
            ]
        return torch.cat(parts).cpu()

    return ranks.divide(len(batch), values_of)


def gae(values: Tensor, batch: Batch, trajectories: Sequence[Trajectory], discount: float, gae_lambda: float) -> Tensor:
    """(N,) generalised advantage estimates (Schulman et al. 2016, eq. 16); one decision is one time step.

    delta_t = r_t + discount * V_{t+1} - V_t with the sparse reward on the last decision and V = 0 behind it: an episode
    that reaches its cap has failed for good. A_t = sum over k of (discount * lambda)^k delta_{t+k}.
    """
    advantages = torch.zeros_like(values)
    ends = (batch.steps_to_end == 0).tolist()
    owners = batch.trajectory.tolist()
    for row in range(len(values) - 1, -1, -1):
        if ends[row]:
            advantages[row] = trajectories[owners[row]].success_return - values[row]
        else:
            delta = discount * values[row + 1] - values[row]
            advantages[row] = delta + discount * gae_lambda * advantages[row + 1]
    return advantages


def with_critic(
    objective: Objective, policy: Policy, critic: ValueHead, config: CriticConfig, values: Tensor, returns: Tensor,
    value_only: bool,
) -> Objective:  # fmt: skip
    """The policy's objective plus the clipped value loss; `value_only` leaves the policy as it is.

    values (N,) before the update; returns (N,) regression targets, advantage + value. Without any non-zero advantage
    the policy's loss is left out, too: a gradient of zeros would still let AdamW's momentum and weight decay move it.
    """
    through_backbone = config.critic_through_backbone and not value_only
    with_policy_loss = not value_only and bool(objective.active.any())

    def loss(outputs: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Statistics]:
        logits, hidden = outputs
        predicted = critic(hidden if through_backbone else hidden.detach())
        old, target = send(values[rows], predicted.device), send(returns[rows], predicted.device)
        value_loss = clipped_value_loss(predicted, old, target, config.value_clip).sum()
        policy_loss, statistics = objective.loss(logits, rows)
        total = config.value_coef * value_loss + (policy_loss if with_policy_loss else 0)
        sums = statistics.sums | {"train/value_loss": value_loss.detach()}
        return total, Statistics(sums, statistics.maxima, statistics.decisions)

    return Objective(loss, torch.ones(len(values), dtype=torch.bool), policy.chunk_outputs)


def clipped_value_loss(predicted: Tensor, old: Tensor, target: Tensor, clip: float) -> Tensor:
    """(B,) half the larger of the squared errors with and without clipping the change of the value to +-clip."""
    bounded = old + (predicted - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((predicted - target) ** 2, (bounded - target) ** 2)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; 0 for constant returns."""
    variance = returns.var(unbiased=False)
    return 0.0 if variance == 0 else (1 - (returns - values).var(unbiased=False) / variance).item()
