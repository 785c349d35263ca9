"""The losses: distillation in the warmup, then PPO's clipped surrogate with optional KL and entropy terms.

Dimension key: N decisions of the rollout in M trajectories, B decisions of a micro-batch, A tokens of a chunk (8
actions of 7 = 56), V action-token ids (256), L ratios of a decision (1 per chunk, or A per token).

A chunk's log-prob and a decision's loss are means over its executed tokens. (The log-ratio of a sum over 56 tokens
would nearly always be clipped.) Losses are SUMS of weighted decisions over a micro-batch: `rl.update` divides them by
the size of the whole minibatch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.sections import LossConfig, WarmupTarget
from rl.trajectory import Batch
from vla.tokens import FIRST_ACTION_TOKEN, NUM_BINS

# What a loss reports of a micro-batch: sums over its decisions, detached, on the policy's device. `rl.update_metrics`
# says which is a maximum instead, and what becomes of each.
Statistics = dict[str, Tensor]

# Log-ratios are clamped to +-this, so that no ratio overflows. A clamped ratio has no gradient.
LOGRATIO_LIMIT = 5.0
SOFT_TEMPERATURE = 0.3  # of the teacher's distribution as the warmup's target; --help repeats it
DUAL_CLIP = 3.0  # with a negative advantage the ratio is clipped to at most this (Ye et al. 2020)


def distillation_loss(logits: Tensor, micro_batch: Batch, target: WarmupTarget) -> tuple[Tensor, Statistics]:
    """Cross-entropy of the student at temperature 1 with the teacher's target distributions, summed; and statistics.

    logits (B, A, V), of the V action tokens.
    """
    # The tokens are the teacher's, even if the student acted.
    bins = micro_batch.tokens - FIRST_ACTION_TOKEN  # (B, A)
    if target == "soft":
        assert micro_batch.teacher_logprobs is not None
        targets = micro_batch.teacher_logprobs.to(logits.device, non_blocking=True).exp()  # (B, A, V)
    else:
        targets = F.one_hot(bins, NUM_BINS)
    cross_entropy = -(targets * F.log_softmax(logits, dim=-1)).sum(-1)  # (B, A)
    loss = (micro_batch.weights * masked_mean(cross_entropy, micro_batch.executed)).sum()
    with torch.no_grad():
        is_equal = (logits.argmax(-1) == bins).float()  # (B, A)
        accuracy = (micro_batch.weights * masked_mean(is_equal, micro_batch.executed)).sum()
    return loss, {"distill/loss": loss.detach(), "distill/accuracy": accuracy}


def ppo_loss(
    logits: Tensor, logprobs: Tensor, micro_batch: Batch, config: LossConfig, temperature: float
) -> tuple[Tensor, Statistics]:
    """The clipped surrogate (Schulman et al. 2017, eq. 7) + kl_coef * KL(student || teacher) - entropy_coef * entropy.

    Returns the sum over the micro-batch, (), and statistics. logits (B, A, V) and logprobs (B, A) of the batch's tokens
    come from the current policy. `temperature` is the student's sampling temperature; logprobs are computed at it too.
    """
    executed = micro_batch.executed  # (B, A)
    old_logprobs = micro_batch.student_logprobs  # (B, A)
    if config.ratio_level == "chunk":
        logratio = chunk_logratio(logprobs, old_logprobs, executed)  # (B, 1)
        counted = torch.ones_like(logratio, dtype=torch.bool)  # one ratio for each decision
    else:
        logratio = logprobs - old_logprobs  # (B, A)
        counted = executed
    policy_loss, ratio = surrogate_loss(logratio, policy_advantages(micro_batch), counted, config)
    all_logprobs = F.log_softmax(logits / temperature, dim=-1)  # (B, A, V)
    entropies = entropy(all_logprobs, executed)  # (B,)
    loss = policy_loss  # (B,)
    statistics = ppo_statistics(policy_loss, ratio, counted, entropies, logprobs, micro_batch, config)
    if config.kl_coef > 0:
        assert micro_batch.teacher_logprobs is not None
        teacher_logprobs = micro_batch.teacher_logprobs.to(logits.device, non_blocking=True)
        teacher_kl = exact_kl(all_logprobs, teacher_logprobs, executed)  # (B,)
        loss = loss + config.kl_coef * teacher_kl
        statistics["train/teacher_kl"] = teacher_kl.detach().sum()
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * entropies
    return (micro_batch.weights * loss).sum(), statistics


@torch.no_grad()
def ppo_statistics(
    policy_loss: Tensor,
    ratio: Tensor,
    counted: Tensor,
    entropies: Tensor,
    logprobs: Tensor,
    micro_batch: Batch,
    config: LossConfig,
) -> Statistics:
    """What `ppo_loss` reports of a micro-batch, from its policy loss and entropies (B,), ratios and `counted` (B, L).

    Only the loss is weighted.
    """
    executed = micro_batch.executed  # (B, A)
    chunk_ratio = chunk_logratio(logprobs, micro_batch.student_logprobs, executed).exp()  # (B, 1)
    token_ratio = (logprobs - micro_batch.student_logprobs).exp()  # (B, A)
    kl = approx_kl(logprobs, micro_batch.student_logprobs, executed)  # (B,)
    share = counted / counted.sum(-1, keepdim=True)  # (B, L) the weight of each ratio in its decision's mean
    is_outside = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) != ratio  # (B, L)
    return {
        "train/policy_loss": (micro_batch.weights * policy_loss).sum(),
        "train/ratio_mean": (ratio * share).sum(),
        "train/ratio_max": ratio.masked_fill(~counted, -torch.inf).max(),
        "train/clip_fraction": (is_outside * share).sum(),
        "train/entropy": entropies.sum(),
        "chunk_ratio_error": (chunk_ratio - 1).abs().sum(),
        "token_ratio_error": masked_mean((token_ratio - 1).abs(), executed).sum(),
        "student_kl": kl.masked_fill(micro_batch.by_teacher, 0.0).sum(),
        "student_decisions": (~micro_batch.by_teacher).sum().float(),
    }


def surrogate_loss(
    logratio: Tensor, advantages: Tensor, counted: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """The policy loss of each decision (B,), which is -(mean clipped ratio) * advantage, and its ratios (B, L).

    logratio, counted (B, L), True for the ratios that count; advantages (B,). This is PPO's pessimistic minimum of the
    clipped and the unclipped term (Schulman et al. 2017, eq. 7), written by the sign of the advantage:
    positive: a ratio is clipped to at most 1 + clip_high, so that raising it further gains nothing;
    negative: a ratio is clipped to at least 1 - clip_low, so that lowering it further gains nothing, and to at most
    DUAL_CLIP (Ye et al. 2020, eq. 5): without this one unlikely token could have a gradient of up to exp(5).
    """
    ratio = logratio.clamp(-LOGRATIO_LIMIT, LOGRATIO_LIMIT).exp()
    ratio_if_good = ratio.clamp(max=1 + config.clip_high)
    ratio_if_bad = ratio.clamp(1 - config.clip_low, DUAL_CLIP)
    clipped = torch.where(advantages[:, None] > 0, ratio_if_good, ratio_if_bad)
    return -masked_mean(clipped, counted) * advantages, ratio


def policy_advantages(batch: Batch) -> Tensor:
    """The advantages (N,) that multiply the ratios in the surrogate: at least 0 where the teacher made the decision.

    The teacher's chunk was not drawn from the student. A negative advantage would push the student away from what the
    teacher does.
    """
    return torch.where(batch.by_teacher, batch.advantages.clamp(min=0), batch.advantages)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each decision over its executed tokens or counted ratios: (B, A) or (B, L) -> (B,)."""
    return (values * mask).sum(-1) / mask.sum(-1)


def chunk_logratio(new: Tensor, old: Tensor, executed: Tensor) -> Tensor:
    """The difference of two chunk log-probs, (B, 1). A chunk's is the mean of the token log-probs (B, A) executed."""
    return masked_mean(new - old, executed)[:, None]


def approx_kl(new: Tensor, old: Tensor, executed: Tensor) -> Tensor:
    """(B,) estimate k2 of KL(old || new) per token: half the mean squared log-ratio (Schulman 2020).

    The estimate k3, (r - 1) - log r, has less bias, but grows with the ratio r: one token that has become 57 times as
    likely made up a fifth of a whole rollout's k3.
    """
    return masked_mean((new - old).square() / 2, executed)


def exact_kl(logprobs: Tensor, reference_logprobs: Tensor, executed: Tensor) -> Tensor:
    """(B,) mean over executed tokens of KL(policy || reference), both (B, A, V) normalised log-probs."""
    return masked_mean((logprobs.exp() * (logprobs - reference_logprobs)).sum(-1), executed)


def entropy(logprobs: Tensor, executed: Tensor) -> Tensor:
    """(B,) mean over executed tokens of the entropy in nats of (B, A, V) log-probs."""
    return masked_mean(-(logprobs.exp() * logprobs).sum(-1), executed)
