"""What an update minimises: distillation in the warmup, the clipped surrogate afterwards.

Dimension key: N decisions of the rollout, B of a micro-batch, A action tokens of a chunk, V action-token ids (256).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.config import LossConfig, PhaseConfig
from rl.contracts import Policy
from rl.losses import (
    Statistics,
    approximate_kl,
    behaviour_log_ratio,
    chunk_log_ratio,
    clipped_surrogate,
    distillation_loss,
    entropy,
    exact_kl,
)
from rl.ranks import ALONE, Ranks
from rl.trajectory import Batch
from transfer import send

# The loss of the given rows of the batch, as a sum over them, from what `Objective.outputs` gives for them: the
# student's logits (B, A, V), or these and more.
MicroLoss = Callable[[Any, Tensor], tuple[Tensor, Statistics]]


@dataclass(frozen=True)
class Objective:
    """What an update minimises: the mean over N decisions of the rows' losses."""

    loss: MicroLoss
    active: Tensor  # (N,) bool; rows that cannot contribute a gradient are False and never run
    outputs: Callable[[Sequence[Any]], Any] | None = None  # what `loss` reads of the policy; None: its chunk_logits


def distillation_objective(
    policy: Policy, batch: Batch, phases: PhaseConfig, micro_batch_size: int, ranks: Ranks = ALONE
) -> Objective:
    """Match the tokens that the teacher chose, or its sharpened distribution at the same observations."""
    teacher_logprobs = None
    if phases.distill_target == "sharpened":
        teacher_logprobs = teacher_distribution(policy, batch, phases.distill_temperature, micro_batch_size, ranks)

    def loss(logits: Tensor, rows: Tensor) -> tuple[Tensor, Statistics]:
        device = logits.device
        target = None if teacher_logprobs is None else send(teacher_logprobs[rows], device)
        tokens, executed = send(batch.tokens[rows], device), send(batch.executed[rows], device)
        return distillation_loss(logits, tokens, executed, target, phases.distill_student_temperature)

    return Objective(loss, torch.ones(len(batch), dtype=torch.bool))


def policy_objective(
    policy: Policy,
    batch: Batch,
    advantages: Tensor,
    config: LossConfig,
    temperature: float,
    micro_batch_size: int,
    behaviour_epsilon: float | None = None,
    ranks: Ranks = ALONE,
) -> Objective:
    """The clipped surrogate, with the optional KL and entropy terms.

    advantages (N,); behaviour_epsilon: the transition's epsilon when the ratio is against the mixture that acted. A
    zero advantage means a zero gradient unless KL or entropy are on: such rows are inactive.
    """
    weights = decision_weights(batch, config.aggregation)
    regularised = config.kl_coef > 0 or config.entropy_coef > 0
    teacher_logprobs = None
    if config.kl_coef > 0:
        teacher_logprobs = teacher_distribution(policy, batch, temperature, micro_batch_size, ranks)

    def loss(logits: Tensor, rows: Tensor) -> tuple[Tensor, Statistics]:
        device = logits.device
        tokens, executed = send(batch.tokens[rows], device), send(batch.executed[rows], device)
        old, weight = send(batch.student_logprobs[rows], device), send(weights[rows], device)
        new = policy.token_logprobs(logits, tokens, temperature)

        if behaviour_epsilon is not None:
            log_ratio = behaviour_log_ratio(
                new, old, executed, send(batch.matches_teacher[rows], device), behaviour_epsilon
            )
        elif config.ratio_level == "chunk":
            log_ratio = chunk_log_ratio(new, old, executed)
        else:
            log_ratio = new - old
        counted = executed if config.ratio_level == "token" else executed[:, :1]
        advantage = send(advantages[rows], device)
        surrogate, ratio, clipped = clipped_surrogate(log_ratio, advantage, counted, config.clip_high)
        per_decision = surrogate
        all_logprobs = F.log_softmax(logits / temperature, dim=-1)
        entropies = entropy(all_logprobs, executed)
        if teacher_logprobs is not None:
            kl = exact_kl(all_logprobs, send(teacher_logprobs[rows], device), executed)
            per_decision = per_decision + config.kl_coef * kl
        if config.entropy_coef > 0:
            per_decision = per_decision - config.entropy_coef * entropies

        with torch.no_grad():
            share = counted / counted.sum(-1, keepdim=True)
            drift = (chunk_log_ratio(new, old, executed).exp() - 1).abs()
            sums = {
                "train/policy_loss": (weight * surrogate).sum(),
                "train/clip_fraction": (clipped * share).sum(),
                "train/approx_kl": approximate_kl(new, old, executed).sum(),
                "train/ratio_mean": (ratio * share).sum(),
                "train/entropy": entropies.sum(),
                "ratio_error": drift.sum(),
            }
            if teacher_logprobs is not None:
                sums["train/teacher_kl"] = kl.sum()
            maxima = {"train/ratio_max": ratio.masked_fill(~counted, -torch.inf).max()}
        return (weight * per_decision).sum(), Statistics(sums, maxima, len(rows))

    return Objective(loss, torch.ones(len(batch), dtype=torch.bool) if regularised else advantages != 0)


def decision_weights(batch: Batch, aggregation: str) -> Tensor:
    """(N,) weights with mean 1: equal per decision, or so that the decisions of every trajectory add up to the same."""
    if aggregation == "decision":
        return torch.ones(len(batch))
    lengths = batch.trajectory_lengths
    return (len(batch) / len(lengths)) / lengths[batch.trajectory]


def teacher_distribution(
    policy: Policy, batch: Batch, temperature: float, micro_batch_size: int, ranks: Ranks = ALONE
) -> Tensor:
    """(N, A, V) log-probs of the frozen teacher at `temperature`, computed once per update."""

    def logprobs_of(rows: Tensor) -> Tensor:
        parts = []
        with torch.no_grad(), policy.teacher():
            for micro in rows.split(micro_batch_size * len(policy.devices)):
                logits = policy.chunk_logits([batch.observations[i] for i in micro])
                parts.append(F.log_softmax(logits / temperature, dim=-1).cpu())
        return torch.cat(parts)

    return ranks.divide(len(batch), logprobs_of)
