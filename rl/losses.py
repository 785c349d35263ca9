"""Distillation loss and clipped surrogate. Pure; each returns a SUM over decisions and statistics, the caller divides.

Dimension key: B decisions of a micro-batch, A action tokens of a chunk (56), V action-token ids (256).
A decision's value is the mean over its executed tokens: a sum over 56 tokens would saturate the clip (SPEC 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_RATIO_LIMIT = 5.0
FIRST_ACTION_TOKEN = 31744  # index v of the last axis is token id 31744 + v


@dataclass(frozen=True)
class Statistics:
    """Sums over the decisions of a micro-batch; divide by `decisions`.

    Scalars on the policy's device, without gradient: to read one is to wait for the device.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    decisions: int


def masked_mean(values: Tensor, executed: Tensor) -> Tensor:
    """(B,) from (B, A): mean over the executed tokens of each decision."""
    return (values * executed).sum(-1) / executed.sum(-1)


def distillation_loss(
    logits: Tensor,
    tokens: Tensor,
    executed: Tensor,
    teacher_logprobs: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Statistics]:
    """Cross-entropy of the student at `temperature` to the teacher, summed over decisions.

    logits (B, A, V); tokens (B, A) ids the teacher chose; executed (B, A) bool. With `teacher_logprobs` (B, A, V), a
    normalised distribution, the target is that distribution in place of the tokens.
    """
    targets = tokens - FIRST_ACTION_TOKEN
    logprobs = F.log_softmax(logits / temperature, dim=-1)
    if teacher_logprobs is None:
        cross_entropy = -logprobs.gather(-1, targets[..., None]).squeeze(-1)
    else:
        cross_entropy = -(teacher_logprobs.exp() * logprobs).sum(-1)
    per_decision = masked_mean(cross_entropy, executed)
    with torch.no_grad():
        accuracy = masked_mean((logits.argmax(-1) == targets).float(), executed)
    loss = per_decision.sum()
    return loss, Statistics({"distill/loss": loss.detach(), "distill/accuracy": accuracy.sum()}, {}, len(tokens))


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, executed: Tensor, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss -min(ratio * A, clip(ratio) * A) of each decision, its ratios and where the clip held.

    log_ratio (B, L): one column per ratio (L = 1 for chunk ratios, A for token ratios); advantages (B,);
    executed (B, L) bool. A > 0 clips above 1 + clip_high, A < 0 below 1 - clip_high. PPO (Schulman et al. 2017, eq. 7)
    has bounds on the other sides, too, but its minimum never takes them: there the unclipped term is the smaller one.
    Returns loss (B,), ratio (B, L), clipped (B, L) bool.
    """
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    sign = advantages[:, None]
    bounded = torch.where(sign > 0, ratio.clamp(max=1 + clip_high), ratio.clamp(min=1 - clip_high))
    surrogate = torch.minimum(ratio * sign, bounded * sign)
    clipped = (bounded * sign < ratio * sign) & executed
    return -masked_mean(surrogate, executed), ratio, clipped


def chunk_log_ratio(new: Tensor, old: Tensor, executed: Tensor) -> Tensor:
    """(B, 1) difference of chunk log-probs (means over executed tokens) from (B, A) token log-probs."""
    return masked_mean(new - old, executed)[:, None]


def behaviour_log_ratio(new: Tensor, old: Tensor, executed: Tensor, matches_teacher: Tensor, epsilon: float) -> Tensor:
    """(B, 1) log of pi_new(chunk) / behaviour(chunk), joint over the executed tokens.

    The mixture that acted in the transition has probability eps * [chunk = teacher's] + (1 - eps) * pi_old(chunk);
    both factors are of the executed prefix of the chunk, the event that really happened. new, old (B, A) student token
    log-probs; matches_teacher (B, A) bool.
    """
    student = (old * executed).sum(-1)
    is_teachers = (matches_teacher | ~executed).all(-1)
    log_epsilon = math.log(epsilon) if epsilon > 0 else -math.inf
    from_student = student + (math.log1p(-epsilon) if epsilon < 1 else -math.inf)
    from_teacher = torch.full_like(student, -math.inf).masked_fill(is_teachers, log_epsilon)
    behaviour = torch.logaddexp(from_student, from_teacher)
    return ((new * executed).sum(-1) - behaviour)[:, None]


def approximate_kl(new: Tensor, old: Tensor, executed: Tensor) -> Tensor:
    """(B,) k3 estimate of KL(old || new) per token: mean of (r - 1) - log r, never negative (Schulman 2020)."""
    log_ratio = new - old
    return masked_mean(torch.expm1(log_ratio) - log_ratio, executed)


def exact_kl(logprobs: Tensor, reference_logprobs: Tensor, executed: Tensor) -> Tensor:
    """(B,) mean over executed tokens of KL(policy || reference), both (B, A, V) normalised log-probs."""
    return masked_mean((logprobs.exp() * (logprobs - reference_logprobs)).sum(-1), executed)


def entropy(logprobs: Tensor, executed: Tensor) -> Tensor:
    """(B,) mean over executed tokens of the entropy in nats of (B, A, V) log-probs."""
    return masked_mean(-(logprobs.exp() * logprobs).sum(-1), executed)
