"""Measure what a decision depends on: how far does it move when one of its inputs is replaced by another one?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from contracts import Observation
from vla.policy import Policy


def decision_changes(
    policy: Policy,
    observation: Observation,
    other_observations: Sequence[Observation],
    instruction: str | None,
) -> dict[str, float]:
    """How far the decision on `observation` moves if one input is replaced: input -> nats a token at temperature 1.

    Images and robot state are replaced by those of each of `other_observations`, and the largest change counts. The
    robot state is left out if the policy does not read it, the instruction if there is no other one.
    """
    black = replace(observation, images=np.zeros_like(observation.images))
    replacements = {
        "another image": [replace(observation, images=other.images) for other in other_observations],
        "a black image": [black],
    }
    if policy.info.uses_proprio:
        replacements["another robot state"] = [
            replace(observation, proprio=other.proprio) for other in other_observations
        ]
    if instruction is not None:
        replacements["another instruction"] = [replace(observation, instruction=instruction)]
    before = _decision(policy, observation)
    changes = {}
    for name, observations in replacements.items():
        changes[name] = max(kl_divergence(before, _decision(policy, other)) for other in observations)
    return changes


def _decision(policy: Policy, observation: Observation) -> Tensor:
    """Log-probabilities of the action tokens, (2, A, 256): twice the same, as in the other checks.

    On a GPU every new batch size would be recorded, and for a batch of 1 a large network would be compiled again.
    """
    return log_probabilities(policy, [observation] * 2, batch_size=2)


@torch.no_grad()
def log_probabilities(policy: Policy, observations: Sequence[Observation], batch_size: int) -> Tensor:
    """Log-probabilities of the action tokens at temperature 1, (N, A, 256) on the CPU."""
    batches = [observations[start : start + batch_size] for start in range(0, len(observations), batch_size)]
    return torch.cat([policy.chunk_logits(batch).log_softmax(-1).cpu() for batch in batches])


def kl_divergence(before: Tensor, after: Tensor) -> float:
    """Mean over decisions and tokens of KL(before || after) in nats, from log-probabilities (N, A, 256)."""
    return (before.exp() * (before - after)).sum(-1).mean().item()
