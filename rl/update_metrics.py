"""What is measured during an update: statistics become metrics, and say when to end the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from contracts import BadInput, SelfCheckError
from rl.losses import Statistics
from rl.ranks import Ranks

# What becomes of the statistics of `rl.losses`. All are sums over decisions, except for these, whose largest counts:
MAXIMA = ("train/ratio_max",)
# Means over the active decisions of all epochs, while the policy changes:
MEANS_DURING_UPDATE = (
    "distill/loss",
    "distill/accuracy",
    "train/policy_loss",
    "train/ratio_mean",
    "train/teacher_kl",
)
# Means over a sample of all decisions once the update is done (`rl.update.measure_sample`):
MEASURED_AFTERWARDS = ("train/entropy", "train/clip_fraction")

SPIKE_FACTOR = 100.0  # times max_grad_norm: a step with a larger gradient is counted as a spike
# Limits of the mean |ratio - 1| before any optimizer step, of chunks and of tokens. In a chunk the errors of its
# 56 tokens cancel; in bfloat16 those of chunks were at most 0.013.
FIRST_RATIO_LIMITS = {"chunk": 0.05, "token": 0.3}
MAX_UPDATES_WITHOUT_SIGNAL = 10  # after this many updates in a row without an optimizer step the run stops


def student_kl(sums: Mapping[str, float]) -> float | None:
    """Approximate KL of the student's own decisions, in nats per token; None without such decisions.

    The estimate needs tokens that the student drew. A token of the teacher would distort it: if the student gave that a
    probability of 0.05 and now gives it 0.064, the estimate is 0.03, while the KL divergence is about 0.002.
    """
    decisions = sums.get("student_decisions", 0.0)
    return sums["student_kl"] / decisions if decisions else None


def sum_statistics(statistics: Sequence[Statistics], ranks: Ranks) -> dict[str, float]:
    """Merge the statistics of all ranks' micro-batches into one; they leave the device in one transfer."""
    on_device = [value for micro_batch in statistics for value in micro_batch.values()]
    values = iter(torch.stack(on_device).tolist() if on_device else [])
    on_cpu = [{name: next(values) for name in micro_batch} for micro_batch in statistics]
    return merge(ranks.gather(merge(on_cpu)))


def merge(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Merge the statistics of several parts."""
    whole: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name in MAXIMA:
                whole[name] = max(whole.get(name, value), value)
            else:
                whole[name] = whole.get(name, 0.0) + value
    return whole


def mean_statistics(statistics: dict[str, float]) -> dict[str, float]:
    """The metrics of an update's active decisions; none if there were none."""
    means = {
        name: statistics[name] / statistics["decisions"] for name in MEANS_DURING_UPDATE if name in statistics
    }
    return means | {name: statistics[name] for name in MAXIMA if name in statistics}


def step_metrics(gradient_norms: Sequence[float], max_grad_norm: float) -> dict[str, float]:
    """Metrics of the optimizer steps. gradient_norms: L2 norms before clipping, NaN for a skipped step."""
    taken = [norm for norm in gradient_norms if not math.isnan(norm)]
    return {
        "train/grad_norm": sum(taken) / len(taken) if taken else 0.0,
        "train/optimizer_steps": len(taken),
        "train/skipped_steps": len(gradient_norms) - len(taken),
        "train/gradient_spikes": sum(norm > SPIKE_FACTOR * max_grad_norm for norm in taken),
    }


# Reasons to stop


def check_first_ratios(statistics: Mapping[str, float]) -> dict[str, float]:
    """Check the mean |ratio - 1| of an update's first minibatch, of chunks and of tokens. Raises SelfCheckError.

    No optimizer step was taken since the rollout, so the policy is the one that acted, and every ratio should be 1.
    Returns the metrics train/first_ratio_error and train/first_token_ratio_error; none in the warmup, which has no
    ratios.
    """
    if "chunk_ratio_error" not in statistics:
        return {}
    metrics: dict[str, float] = {}
    for level, metric in (("chunk", "first_ratio_error"), ("token", "first_token_ratio_error")):
        error = statistics[f"{level}_ratio_error"] / statistics["decisions"]
        limit = FIRST_RATIO_LIMITS[level]
        if not error <= limit:  # also for NaN
            raise SelfCheckError(
                f"first minibatch: mean |{level} ratio - 1| = {error:.4f} before any optimizer step (limit {limit}): "
                "the update does not see the policy that acted (its weights, temperature, preprocessing and precision)"
            )
        metrics[f"train/{metric}"] = error
    return metrics


def check_diverged(gradient_norms: Sequence[float], update_index: int) -> None:
    """Raise BadInput when no optimizer step of an epoch could be taken. Further epochs would not be better."""
    if gradient_norms and all(math.isnan(norm) for norm in gradient_norms):
        raise BadInput(
            f"the training has diverged: in update {update_index + 1} all optimizer steps of an epoch had a non-finite "
            "or enormous gradient. It is not saved, and --resume would repeat it: start a new run with a lower --lr "
            "and --desired-kl (in the warmup --warmup-lr), for example from `--checkpoint RUN/checkpoints/best`"
        )


def stop_without_signal(updates_without_signal: int) -> None:
    """Raise BadInput when MAX_UPDATES_WITHOUT_SIGNAL updates in a row took no step."""
    if updates_without_signal >= MAX_UPDATES_WITHOUT_SIGNAL:
        raise BadInput(
            f"no learning signal: the last {updates_without_signal} updates had no decision to learn from; the warning "
            "of each says why, and what to do; --resume would play one more rollout and stop again"
        )
