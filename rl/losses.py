"""The losses: distillation in the warmup, PPO's clipped surrogate afterwards, with optional KL and entropy terms.

Dimension key: N decisions of the rollout in M trajectories, B decisions of a micro-batch, A tokens of a chunk (8
actions of 7 = 56), V action-token ids (256), L ratios of a decision (1 per chunk, or A per token).

A chunk's log-prob, and a decision's loss, are means over the executed tokens (a sum over 56 would saturate the clip).
Losses are SUMS of weighted decisions over a micro-batch: `rl.update` divides by the size of the whole minibatch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.config import LossConfig
from rl.trajectory import Batch
from vla.tokens import FIRST_ACTION_TOKEN

LOGRATIO_LIMIT = (
    5.0  # log-ratios are clamped to +-this, so that no ratio overflows; beyond it there is no gradient
)
DUAL_CLIP = 3.0  # with a negative advantage a ratio above this costs no more (Ye et al. 2020)

# Sums over the decisions of a micro-batch (maxima where the name ends in _max), on the policy's device, no gradient.
Statistics = dict[str, Tensor]


def distillation_loss(
    logits: Tensor, micro_batch: Batch, temperature: float = 1.0, other_logsumexp: Tensor | None = None
) -> tuple[Tensor, Statistics]:
    """Cross-entropy of the student at `temperature` to the teacher's tokens.

    logits (B, A, V). The softmax is over the V action tokens. With other_logsumexp (B, A), the log-sum-exp of the
    logits of all other ids, it is over all ids: a head that was never trained on action tokens has to learn that these
    are the ones to use.
    """
    targets = micro_batch.tokens - FIRST_ACTION_TOKEN  # (B, A), the teacher's tokens, whoever has acted
    logprobs = F.log_softmax(logits / temperature, dim=-1)  # (B, A, V)
    cross_entropy = -logprobs.gather(-1, targets[..., None]).squeeze(-1)  # (B, A)
    if other_logsumexp is not None:
        # -log of the action tokens' share of the probability: log(1 + exp(others - actions)). At temperature 1, as is
        # all supervised training.
        cross_entropy = cross_entropy + F.softplus(other_logsumexp - logits.logsumexp(-1))
    loss = (micro_batch.weights * masked_mean(cross_entropy, micro_batch.executed)).sum()
    with torch.no_grad():
        is_equal = (logits.argmax(-1) == targets).float()  # (B, A)
        accuracy = (micro_batch.weights * masked_mean(is_equal, micro_batch.executed)).sum()
    return loss, {"distill/loss": loss.detach(), "distill/accuracy": accuracy}


def ppo_loss(
    logits: Tensor, logprobs: Tensor, micro_batch: Batch, config: LossConfig, temperature: float
) -> tuple[Tensor, Statistics]:
    """The clipped surrogate (Schulman et al. 2017, eq. 7) + kl_coef * KL(student || teacher) - entropy_coef * entropy.

    logits (B, A, V) and logprobs (B, A), of the batch's tokens, are those of the policy as it is now. `temperature` is
    the one at which the student was sampled: both log-probs of a ratio are those of the distribution that acted.
    """
    executed = micro_batch.executed  # (B, A)
    old_logprobs = micro_batch.student_logprobs  # (B, A)
    if config.ratio_level == "chunk":
        logratio = chunk_logratio(logprobs, old_logprobs, executed)  # (B, 1)
        counted = torch.ones_like(logratio, dtype=torch.bool)  # one ratio for each decision
    else:
        logratio = logprobs - old_logprobs  # (B, A)
        counted = executed
    surrogate, ratio = clipped_surrogate(logratio, policy_advantages(micro_batch), counted, config)
    all_logprobs = F.log_softmax(logits / temperature, dim=-1)  # (B, A, V)
    entropies = entropy(all_logprobs, executed)  # (B,)
    loss = surrogate  # (B,)
    if config.kl_coef > 0:
        assert micro_batch.teacher_logprobs is not None
        teacher_logprobs = micro_batch.teacher_logprobs.to(logits.device, non_blocking=True)
        teacher_kl = exact_kl(all_logprobs, teacher_logprobs, executed)  # (B,)
        loss = loss + config.kl_coef * teacher_kl
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * entropies

    with torch.no_grad():
        chunk_ratio = chunk_logratio(logprobs, old_logprobs, executed).exp()  # (B, 1)
        # (B, L) the weight of each ratio in its decision's mean.
        share = counted / counted.sum(-1, keepdim=True)
        # Statistics other than the loss are not weighted, and do not depend on the advantage: `rl.update` measures some
        # over all decisions, also those that are left out, so that kinds of advantage can be compared.
        is_outside = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) != ratio  # (B, L)
        statistics = {
            "train/policy_loss": (micro_batch.weights * surrogate).sum(),
            "train/clip_fraction": (is_outside * share).sum(),
            "train/approx_kl": approx_kl(logprobs, old_logprobs, executed).sum(),
            "train/ratio_mean": (ratio * share).sum(),
            "train/entropy": entropies.sum(),
            "train/ratio_max": ratio.masked_fill(~counted, -torch.inf).max(),
            "ratio_error": (chunk_ratio - 1).abs().sum(),
        }
        if config.kl_coef > 0:
            statistics["train/teacher_kl"] = teacher_kl.sum()
    return (micro_batch.weights * loss).sum(), statistics


def clipped_surrogate(
    logratio: Tensor, advantages: Tensor, counted: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """The loss of each decision (B,), which is -(mean clipped ratio) * advantage, and its ratios (B, L).

    logratio, counted (B, L), True for the ratios that count; advantages (B,). This is PPO's pessimistic minimum of the
    clipped and the unclipped term (Schulman et al. 2017, eq. 7), written by the sign of the advantage:
    positive: a ratio is clipped to at most 1 + clip_high, where more of it gains nothing;
    negative: a ratio is clipped to at least 1 - clip_low, where less of it gains nothing, and to at most DUAL_CLIP (Ye
    et al. 2020, eq. 5), where more of it costs nothing: one unlikely token would have a gradient of up to exp(5).
    """
    ratio = logratio.clamp(-LOGRATIO_LIMIT, LOGRATIO_LIMIT).exp()
    ratio_if_good = ratio.clamp(max=1 + config.clip_high)
    ratio_if_bad = ratio.clamp(1 - config.clip_low, DUAL_CLIP)
    clipped = torch.where(advantages[:, None] > 0, ratio_if_good, ratio_if_bad)
    return -masked_mean(clipped, counted) * advantages, ratio


def policy_advantages(batch: Batch) -> Tensor:
    """(N,) the advantages that the surrogate multiplies ratios by: where the teacher has decided, at least 0.

    The teacher's chunk was not drawn from the student: a negative advantage would push the student away from what the
    teacher does.
    """
    return torch.where(batch.by_teacher, batch.advantages.clamp(min=0), batch.advantages)


def weighs_trajectories(config: LossConfig) -> bool:
    """Whether all trajectories weigh the same, instead of all executed tokens.

    `auto`: for group, rloo and batch. Failed episodes are longer, and would dominate a mean over tokens.
    """
    if config.aggregation == "auto":
        return config.advantage in ("group", "rloo", "batch")
    return config.aggregation == "trajectory"


def decision_weights(batch: Batch, by_trajectory: bool) -> Tensor:
    """(N,) weights of the decisions in the loss, with mean 1: all trajectories, or all executed tokens, weigh the same.

    A decision's loss is a mean over its executed tokens. The weights turn the mean over decisions into the mean over
    all executed tokens of the rollout, or of each trajectory: a chunk that the episode's end has cut weighs as much
    less as it is shorter.
    """
    tokens = batch.executed.sum(-1)  # (N,) executed tokens of each decision
    if not by_trajectory:
        return tokens * len(batch) / tokens.sum()
    trajectory_tokens = torch.bincount(batch.trajectory, tokens)  # (M,)
    return (tokens * len(batch) / trajectory_tokens[batch.trajectory] / len(trajectory_tokens)).float()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B,) from (B, A) or (B, L): mean over the executed tokens, or the counted ratios, of each decision."""
    return (values * mask).sum(-1) / mask.sum(-1)


def chunk_logratio(new: Tensor, old: Tensor, executed: Tensor) -> Tensor:
    """(B, 1) difference of chunk log-probs, which are means over executed tokens of the token log-probs (B, A)."""
    return masked_mean(new - old, executed)[:, None]


def approx_kl(new: Tensor, old: Tensor, executed: Tensor) -> Tensor:
    """(B,) estimate k3 of KL(old || new) per token: mean of (r - 1) - log r, never negative (Schulman 2020)."""
    logratio = new - old
    return masked_mean(torch.expm1(logratio) - logratio, executed)


def exact_kl(logprobs: Tensor, reference_logprobs: Tensor, executed: Tensor) -> Tensor:
    """(B,) mean over executed tokens of KL(policy || reference), both (B, A, V) normalised log-probs."""
    return masked_mean((logprobs.exp() * (logprobs - reference_logprobs)).sum(-1), executed)


def entropy(logprobs: Tensor, executed: Tensor) -> Tensor:
    """(B,) mean over executed tokens of the entropy in nats of (B, A, V) log-probs."""
    return masked_mean(-(logprobs.exp() * logprobs).sum(-1), executed)
