"""The algorithm's mathematics: advantages, distillation, the clipped surrogate, KL, entropy.

Dimension key: N decisions of the rollout, B of a micro-batch, A tokens of a chunk (56), V action-token ids (256).
A decision's loss is the mean over its executed tokens, as a sum over 56 would saturate the clip, times its weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.config import LossConfig
from envs.perturb import label_of
from rl.trajectory import Batch, Trajectory
from vla.tokens import FIRST_ACTION_TOKEN

EPSILON = 1e-6  # keeps the division by a standard deviation finite
ADVANTAGE_LIMIT = 10.0  # |A| is clamped to this
LOGRATIO_LIMIT = 5.0
DUAL_CLIP = 3.0  # where A < 0 a ratio above this costs no more (Ye et al. 2020)

# Sums over the decisions of a micro-batch (maxima where the name ends so), on the policy's device, without gradient.
Statistics = dict[str, Tensor]


def compute_advantages(batch: Batch, trajectories: Sequence[Trajectory], config: LossConfig) -> Tensor:
    """(N,) advantage of every decision from the returns of its trajectory, its group, or its task in the rollout.

    `absolute` is the return itself, discounted per decision from the last one backwards: failures give no gradient and
    cost no compute. The relative kinds give every decision of a trajectory the same value.
    """
    returns = torch.tensor([float(t.success) for t in trajectories])
    groups = torch.tensor([t.episode.group for t in trajectories])
    if config.advantage == "absolute":
        advantages = returns[batch.trajectory] * config.discount**batch.steps_to_end
    elif config.advantage in ("batch", "gae"):
        advantages = returns.clone()
        kinds = [(t.episode.task_id, label_of(t.episode.perturbation)) for t in trajectories]
        for kind in set(kinds):  # else every episode of an easy task would count as good
            same = torch.tensor([other == kind for other in kinds])
            advantages[same] -= returns[same].mean()
        advantages = scaled(advantages)[batch.trajectory]
    else:
        relative = standardised if config.advantage == "group" else minus_mean_of_others
        advantages = torch.zeros_like(returns)
        for group in groups.unique():
            advantages[groups == group] = relative(returns[groups == group])
        advantages = advantages[batch.trajectory]
    return advantages.clamp(-ADVANTAGE_LIMIT, ADVANTAGE_LIMIT)


def standardised(returns: Tensor) -> Tensor:
    """A_i = (R_i - mean) / (std + 1e-6), unbiased std; exactly 0 when all are equal (GRPO, Shao et al. 2024, eq. 3)."""
    return (
        scaled(returns - returns.mean()) if bool((returns != returns[0]).any()) else torch.zeros_like(returns)
    )


def scaled(centred: Tensor) -> Tensor:
    """Divided by their unbiased standard deviation + 1e-6; 0 for one alone."""
    return centred / (centred.std() + EPSILON) if len(centred) > 1 else torch.zeros_like(centred)


def minus_mean_of_others(returns: Tensor) -> Tensor:
    """A_i = R_i - mean of the others (RLOO, Ahmadian et al. 2024); 0 for one alone."""
    return (
        returns - (returns.sum() - returns) / (len(returns) - 1)
        if len(returns) > 1
        else torch.zeros_like(returns)
    )


def policy_advantages(batch: Batch) -> Tensor:
    """(N,) what the surrogate multiplies: A, but max(A, 0) where the teacher decided.

    Its chunk was not drawn from the student: a negative A would push the student off the teacher's mode.
    """
    return torch.where(batch.by_teacher, batch.advantages.clamp(min=0), batch.advantages)


def weighs_trajectories(config: LossConfig) -> bool:
    """Whether all trajectories weigh the same: `auto` where they are compared, lest long failures outweigh."""
    if config.aggregation == "auto":
        return config.advantage in ("group", "rloo", "batch")
    return config.aggregation == "trajectory"


def decision_weights(batch: Batch, by_trajectory: bool) -> Tensor:
    """(N,) weights with mean 1, so that all trajectories, or all of the rollout, weigh the same by executed token.

    They turn a mean over decisions of means over executed tokens into the mean over executed tokens of the rollout (the
    mean of the trajectories' such means): a chunk that the episode's end has cut weighs as much less as it is shorter.
    """
    tokens = batch.executed.sum(-1)
    if not by_trajectory:
        return tokens * len(batch) / tokens.sum()
    of_trajectory = torch.bincount(batch.trajectory, tokens)
    return (tokens * len(batch) / of_trajectory[batch.trajectory] / len(of_trajectory)).float()


# Losses: weighted SUMS over the micro-batch, the caller divides.


def distillation_loss(
    logits: Tensor, micro: Batch, temperature: float = 1.0, others: Tensor | None = None
) -> tuple[Tensor, Statistics]:
    """Cross-entropy of the student at `temperature` to the teacher's tokens.

    Over the action tokens; with `others`, the log of the sum of exp of all other ids' logits (B, A), over all ids: a
    head that was never trained on action tokens has to learn that it is these that are wanted.
    """
    targets = micro.tokens - FIRST_ACTION_TOKEN
    logprobs = F.log_softmax(logits / temperature, dim=-1)
    cross_entropy = -logprobs.gather(-1, targets[..., None]).squeeze(-1)
    if others is not None:
        cross_entropy = cross_entropy + F.softplus(others - logits.logsumexp(-1))
    loss = (micro.weights * masked_mean(cross_entropy, micro.executed)).sum()
    with torch.no_grad():
        accuracy = (micro.weights * masked_mean((logits.argmax(-1) == targets).float(), micro.executed)).sum()
    return loss, {"distill/loss": loss.detach(), "distill/accuracy": accuracy}


def ppo_loss(
    logits: Tensor, logprobs: Tensor, micro: Batch, config: LossConfig, temperature: float
) -> tuple[Tensor, Statistics]:
    """The clipped surrogate with the optional KL and entropy terms.

    logits (B, A, V); logprobs (B, A) of the batch's tokens by the policy as it is now, at `temperature`.
    """
    executed, old_logprobs = micro.executed, micro.student_logprobs
    if config.ratio_level == "chunk":
        logratio = chunk_logratio(logprobs, old_logprobs, executed)
    else:
        logratio = logprobs - old_logprobs
    counted = executed if config.ratio_level == "token" else executed[:, :1]
    surrogate, ratio = clipped_surrogate(logratio, policy_advantages(micro), counted, config)
    all_logprobs = F.log_softmax(logits / temperature, dim=-1)
    entropies, loss = entropy(all_logprobs, executed), surrogate
    if config.kl_coef > 0:
        assert micro.teacher_logprobs is not None
        kl = exact_kl(all_logprobs, micro.teacher_logprobs.to(logits.device, non_blocking=True), executed)
        loss = loss + config.kl_coef * kl
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * entropies

    with torch.no_grad():
        drift = (chunk_logratio(logprobs, old_logprobs, executed).exp() - 1).abs()
        share = counted / counted.sum(-1, keepdim=True)
        outside = (
            ratio.clamp(1 - config.clip_low, 1 + config.clip_high) != ratio
        )  # whatever A is, also where it is 0
        statistics = {
            "train/policy_loss": (micro.weights * surrogate).sum(),
            "train/clip_fraction": (outside * share).sum(),
            "train/approx_kl": approx_kl(logprobs, old_logprobs, executed).sum(),
            "train/ratio_mean": (ratio * share).sum(),
            "train/entropy": entropies.sum(),
            "train/ratio_max": ratio.masked_fill(~counted, -torch.inf).max(),
            "ratio_error": drift.sum(),
        }
        if config.kl_coef > 0:
            statistics["train/teacher_kl"] = kl.sum()
    return (micro.weights * loss).sum(), statistics


def clipped_surrogate(
    logratio: Tensor, advantages: Tensor, executed: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Loss -clip(ratio) * A of each decision (B,), and its ratios (B, L).

    logratio, executed (B, L): one column per ratio (L = 1 for chunk ratios, A for token ratios); advantages (B,).
    A > 0 clips above 1 + clip_high, A < 0 below 1 - clip_low (PPO's minimum never takes its bounds on the other sides,
    Schulman et al. 2017, eq. 7) and above DUAL_CLIP, lest one unlikely token has a gradient of 100 (Ye et al. 2020).
    """
    ratio = logratio.clamp(-LOGRATIO_LIMIT, LOGRATIO_LIMIT).exp()
    gains, loses = ratio.clamp(max=1 + config.clip_high), ratio.clamp(1 - config.clip_low, DUAL_CLIP)
    bounded = torch.where(advantages[:, None] > 0, gains, loses)
    return -masked_mean(bounded, executed) * advantages, ratio


def masked_mean(values: Tensor, executed: Tensor) -> Tensor:
    """(B,) from (B, A): mean over the executed tokens of each decision."""
    return (values * executed).sum(-1) / executed.sum(-1)


def chunk_logratio(new: Tensor, old: Tensor, executed: Tensor) -> Tensor:
    """(B, 1) difference of chunk log-probs (means over executed tokens) from (B, A) token log-probs."""
    return masked_mean(new - old, executed)[:, None]


def approx_kl(new: Tensor, old: Tensor, executed: Tensor) -> Tensor:
    """(B,) k3 estimate of KL(old || new) per token: mean of (r - 1) - log r, never negative (Schulman 2020)."""
    logratio = new - old
    return masked_mean(torch.expm1(logratio) - logratio, executed)


def exact_kl(logprobs: Tensor, reference_logprobs: Tensor, executed: Tensor) -> Tensor:
    """(B,) mean over executed tokens of KL(policy || reference), both (B, A, V) normalised log-probs."""
    return masked_mean((logprobs.exp() * (logprobs - reference_logprobs)).sum(-1), executed)


def entropy(logprobs: Tensor, executed: Tensor) -> Tensor:
    """(B,) mean over executed tokens of the entropy in nats of (B, A, V) log-probs."""
    return masked_mean(-(logprobs.exp() * logprobs).sum(-1), executed)


def gae(
    values: Tensor, batch: Batch, trajectories: Sequence[Trajectory], discount: float, gae_lambda: float
) -> Tensor:
    """(N,) generalised advantage estimates (Schulman et al. 2016, eq. 16); one decision is one time step.

    delta_t = r_t + discount * V_{t+1} - V_t with the sparse reward on the last decision and V = 0 behind it: an episode
    that reaches its cap has failed for good. A_t = sum over k of (discount * lambda)^k delta_{t+k}, standardised over
    the rollout.
    """
    advantages = torch.zeros_like(values)
    for row in reversed(range(len(values))):
        if batch.steps_to_end[row] == 0:
            advantages[row] = float(trajectories[int(batch.trajectory[row])].success) - values[row]
        else:
            delta = discount * values[row + 1] - values[row]
            advantages[row] = delta + discount * gae_lambda * advantages[row + 1]
    return standardised(advantages).clamp(-ADVANTAGE_LIMIT, ADVANTAGE_LIMIT)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; 0 for constant returns."""
    variance = returns.var(unbiased=False)
    return 0.0 if variance == 0 else (1 - (returns - values).var(unbiased=False) / variance).item()
