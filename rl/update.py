"""One update: epochs of minibatches over a rollout.

The gradient of a minibatch is accumulated over micro-batches, and equals that of the whole minibatch computed at once.
A row is active if it can contribute a gradient (`rows_that_learn`). Inactive rows are not computed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.config import TrainConfig, UpdateConfig
from contracts import BadInput, first_line
from rl import losses
from rl.critic import Critic
from rl.optimizer import follow_kl, make_optimizer, optimizer_step, rl_learning_rate
from rl.phases import Phase, PhaseState, TeacherMode
from rl.randomness import torch_generator
from rl.ranks import ALONE, Ranks
from rl.selfcheck import check_first_ratio
from rl.trajectory import Batch
from vla.memory import shrink_batch
from vla.pass_sizes import pass_sizes

if TYPE_CHECKING:
    from vla.policy import Policy

SPIKE_FACTOR = 100.0  # times max_grad_norm: a step with a larger gradient is counted as a spike
MAX_SKIPPED_IN_A_ROW = 20  # after this many skipped optimizer steps in a row the training counts as diverged
MAX_UPDATES_WITHOUT_SIGNAL = 10  # after this many updates in a row with all advantages 0 the run stops
# These metrics are measured at the end of an update over SAMPLE_SIZE rows of the rollout, active or not, so that they
# can be compared between kinds of advantage.
OVER_ALL_ROWS = ("train/entropy", "train/approx_kl", "train/clip_fraction")
SAMPLE_SIZE = 256


@dataclass(frozen=True)
class Learner:
    """What an update changes (policy, optimizer, critic), and the ranks that train it together."""

    policy: Policy
    critic: Critic | None  # with `--advantage gae`
    optimizer: torch.optim.Optimizer
    ranks: Ranks = ALONE  # every rank holds a copy of this learner with the same values
    teacher_mode: TeacherMode = "greedy"  # how the policy's teacher decides


def make_learner(
    policy: Policy, config: TrainConfig, ranks: Ranks = ALONE, teacher_mode: TeacherMode = "greedy"
) -> Learner:
    """Build a learner: AdamW over the policy's trainable parameters, and an empty critic for `--advantage gae`."""
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
    optimizer = make_optimizer(parameters, config.update.lr, config.update.weight_decay)
    policy.watch(optimizer)
    critic = Critic() if config.loss.advantage == "gae" else None
    return Learner(policy, critic, optimizer, ranks, teacher_mode)


def update(
    learner: Learner,
    batch: Batch,
    phase: PhaseState,
    config: TrainConfig,
    update_index: int,
    on_decisions: Callable[[int], None] = lambda decisions: None,
) -> dict[str, float]:
    """Minimise the phase's loss in epochs. Returns the metrics. Raises BadInput if training has diverged.

    The loss is divided by the minibatch's size including inactive rows, so skipping them does not change the gradient.
    A minibatch without active rows takes no step. Every rank computes a slice of each minibatch, which may be empty.
    """
    started = time.perf_counter()
    ranks = learner.ranks
    optimizer = learner.optimizer
    settings = config.update
    parameters = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["lr"] = learning_rate(optimizer, settings, phase)
    active = rows_that_learn(batch, phase, config)
    batch = prepare_batch(learner, batch, phase, config).to(learner.policy.device)
    micro_batch_size = int(settings.micro_batch_size)
    first_ratio_error: float | None = None
    statistics: dict[str, float] = {}  # over all ranks and epochs
    gradient_norms: list[float] = []  # of all optimizer steps, NaN where one was skipped
    for epoch in range(number_of_epochs(settings, phase)):
        epoch_statistics: list[losses.Statistics] = []
        epoch_norms: list[Tensor] = []
        generator = torch_generator(config.run.seed, "minibatches", update_index, epoch)
        for minibatch, size in draw_minibatches(batch, active, settings.batch_size, generator):
            on_decisions(size)
            if len(minibatch) == 0:  # a step would still apply momentum and weight decay
                continue
            micro_batch_size, minibatch_statistics = accumulate_gradient(
                learner, minibatch[ranks.rank :: ranks.size], size, micro_batch_size, phase, config
            )
            if first_ratio_error is None and not phase.distils:  # before the first step
                first_ratio_error = check_first_ratio(sum_statistics(minibatch_statistics, ranks))
            ranks.sum_gradients(parameters)
            epoch_norms.append(optimizer_step(optimizer, settings.max_grad_norm))
            optimizer.zero_grad(set_to_none=True)
            epoch_statistics += minibatch_statistics
        epoch_sums = sum_statistics(epoch_statistics, ranks)  # here the CPU waits for the GPU
        statistics = merge([statistics, epoch_sums])
        gradient_norms += torch.stack(epoch_norms).tolist() if epoch_norms else []
        check_skipped_steps(gradient_norms, update_index)
        if drifted_too_far(epoch_sums, settings.target_kl):
            break

    ranks.check_same_parameters(parameters)
    check_steps_taken(gradient_norms, update_index)
    metrics = mean_statistics(statistics)
    if not phase.distils:
        metrics |= measure_sample(learner, batch, micro_batch_size, phase, config, update_index)
        follow_kl(optimizer, len(gradient_norms), metrics["train/approx_kl"], settings.desired_kl)
    if first_ratio_error is not None:
        metrics["train/first_ratio_error"] = first_ratio_error
    metrics |= step_metrics(gradient_norms, settings.max_grad_norm, optimizer.param_groups[0]["lr"])
    metrics["train/zero_advantage_fraction"] = 1.0 - active.float().mean().item()
    return metrics | {"train/epochs": epoch + 1, "train/time_s": time.perf_counter() - started}


def learning_rate(optimizer: torch.optim.Optimizer, settings: UpdateConfig, phase: PhaseState) -> float:
    """The learning rate of an update. Imitation tolerates larger steps than RL, so the warmup may have its own."""
    if phase.phase is Phase.WARMUP:
        return float(settings.warmup_lr)
    return rl_learning_rate(optimizer, settings.lr)


def number_of_epochs(settings: UpdateConfig, phase: PhaseState) -> int:
    """The passes of an update over its decisions."""
    return int(settings.warmup_epochs) if phase.phase is Phase.WARMUP else settings.n_epochs


def rows_that_learn(batch: Batch, phase: PhaseState, config: TrainConfig) -> Tensor:
    """Which rows are active: (N,) bool, False for rows that cannot contribute a gradient, which are not computed."""
    if phase.distils or config.loss.kl_coef > 0 or config.loss.entropy_coef > 0:
        return torch.ones(len(batch), dtype=torch.bool)
    return losses.policy_advantages(batch) != 0


def prepare_batch(learner: Learner, batch: Batch, phase: PhaseState, config: TrainConfig) -> Batch:
    """Add to the batch what its loss needs besides advantages: weights, and the teacher's tokens or log-probs."""
    by_trajectory = losses.weighs_trajectories(config.loss) and not phase.distils
    batch = replace(batch, weights=losses.decision_weights(batch, by_trajectory))
    if phase.distils:
        if phase.epsilon == 0:  # the student has acted, and learns what the teacher would have done
            batch = replace(batch, tokens=teacher_tokens(learner, batch, config))
    elif config.loss.kl_coef > 0:
        batch = replace(batch, teacher_logprobs=teacher_logprobs(learner, batch, config))
    return batch


def teacher_tokens(learner: Learner, batch: Batch, config: TrainConfig) -> Tensor:
    """The tokens that the teacher chooses for the batch's observations, (N, A). Each rank computes a part."""

    def tokens_of(rows: Tensor) -> Tensor:
        parts = batch[rows].split(int(config.update.micro_batch_size))
        acted = [learner.policy.act_as_teacher(part.observations, learner.teacher_mode) for part in parts]
        return torch.cat([part.tokens for part in acted])

    return learner.ranks.divide(len(batch), tokens_of)


@torch.no_grad()
def teacher_logprobs(learner: Learner, batch: Batch, config: TrainConfig) -> Tensor:
    """The teacher's log-probs at the sampling temperature, (N, A, V) on the CPU. Each rank computes a part."""

    def logprobs_of(rows: Tensor) -> Tensor:
        logprobs: list[Tensor] = []
        with learner.policy.teacher() as teacher:
            for part in batch[rows].split(int(config.update.micro_batch_size)):
                logits = teacher.chunk_logits(part.observations)
                logprobs.append(F.log_softmax(logits / config.rollout.temperature, dim=-1).cpu())
        return torch.cat(logprobs)

    return learner.ranks.divide(len(batch), logprobs_of)


def draw_minibatches(
    batch: Batch, active: Tensor, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Batch, int]]:
    """Deal all rows into random minibatches. Yields each one's active rows, and its size with the inactive ones.

    The rows of the whole epoch are gathered at once. The minibatches are views of them, so that taking one does not
    make the CPU wait for the GPU.
    """
    minibatches = torch.randperm(len(batch), generator=generator).split(batch_size)
    active_rows = [rows[active[rows]] for rows in minibatches]
    parts = batch[torch.cat(active_rows)].split([len(rows) for rows in active_rows])
    return zip(parts, map(len, minibatches), strict=True)


def accumulate_gradient(
    learner: Learner,
    minibatch: Batch,
    size: int,
    micro_batch_size: int,
    phase: PhaseState,
    config: TrainConfig,
) -> tuple[int, list[losses.Statistics]]:
    """Compute the gradient of a minibatch's loss, which is divided by `size`, one micro-batch at a time.

    If memory runs out, the minibatch starts again with a smaller micro-batch. Returns the micro-batch size that fits,
    and the statistics of each micro-batch. Raises BadInput when even the smallest does not fit.
    """
    while True:
        statistics: list[losses.Statistics] = []
        try:
            sizes = pass_sizes(len(minibatch), micro_batch_size, learner.policy.few_sizes)
            for micro_batch in minibatch.split(sizes):
                statistics.append(add_gradient(learner, micro_batch, size, phase, config))
            return micro_batch_size, statistics
        except torch.OutOfMemoryError as error:
            reason = first_line(error)
        # This stands outside the handler, because the exception keeps the failed pass's tensors alive.
        learner.optimizer.zero_grad(set_to_none=True)
        micro_batch_size = shrink_batch(learner.policy, micro_batch_size, reason, is_update=True)


def add_gradient(
    learner: Learner, micro_batch: Batch, size: int, phase: PhaseState, config: TrainConfig
) -> losses.Statistics:
    """Add the gradient of a micro-batch's loss, which is divided by `size`. Returns the micro-batch's statistics.

    The autograd graph ends with this function. It must be gone before the next micro-batch, which may have another size
    and then be recorded as a CUDA graph (see `vla.cuda_graphs`).
    """
    loss_sum, statistics = micro_batch_loss(learner, micro_batch, phase, config)
    (loss_sum / size).backward()
    return statistics | {"decisions": loss_sum.new_full((), len(micro_batch))}


def micro_batch_loss(
    learner: Learner, micro_batch: Batch, phase: PhaseState, config: TrainConfig
) -> tuple[Tensor, losses.Statistics]:
    """The phase's loss, summed over the rows of a micro-batch, (), and its statistics."""
    policy = learner.policy
    if phase.phase is Phase.SUPERVISED:
        logits, other_logsumexp = policy.logits_and_other_logsumexp(micro_batch.observations)
        return losses.distillation_loss(logits, micro_batch, other_logsumexp=other_logsumexp)
    logits = policy.chunk_logits(micro_batch.observations)
    if phase.distils:
        return losses.distillation_loss(logits, micro_batch, config.phases.distill_student_temperature)
    temperature = config.rollout.temperature
    logprobs = policy.token_logprobs(logits, micro_batch.tokens, temperature)
    return losses.ppo_loss(logits, logprobs, micro_batch, config.loss, temperature)


# Statistics and metrics


@torch.no_grad()
def measure_sample(
    learner: Learner,
    batch: Batch,
    micro_batch_size: int,
    phase: PhaseState,
    config: TrainConfig,
    update_index: int,
) -> dict[str, float]:
    """Measure the metrics in OVER_ALL_ROWS with the updated policy, over rows drawn from the whole rollout."""
    ranks = learner.ranks
    generator = torch_generator(config.run.seed, "statistics", update_index)
    rows = torch.randperm(len(batch), generator=generator)[:SAMPLE_SIZE]
    rows_of_rank = batch[rows[ranks.rank :: ranks.size]]
    statistics = [
        micro_batch_loss(learner, micro_batch, phase, config)[1]
        for micro_batch in rows_of_rank.split(micro_batch_size)
    ]
    sums = sum_statistics(statistics, ranks)
    return {name: sums[name] / len(rows) for name in OVER_ALL_ROWS}


def sum_statistics(statistics: Sequence[losses.Statistics], ranks: Ranks) -> dict[str, float]:
    """Merge the statistics of all ranks' micro-batches into one; they leave the device in one transfer."""
    on_device = [value for micro_batch in statistics for value in micro_batch.values()]
    values = iter(torch.stack(on_device).tolist() if on_device else [])
    on_cpu = [{name: next(values) for name in micro_batch} for micro_batch in statistics]
    return merge(ranks.gather(merge(on_cpu)))


def merge(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Merge the statistics of several parts: sums are added; of those whose names end in _max the largest counts."""
    whole: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name.endswith("_max"):
                whole[name] = max(whole.get(name, value), value)
            else:
                whole[name] = whole.get(name, 0.0) + value
    return whole


def mean_statistics(statistics: dict[str, float]) -> dict[str, float]:
    """Turn an update's sums into means over its active decisions; empty if there were none."""
    decisions = statistics.get("decisions", 0)
    return {
        name: value if name.endswith("_max") else value / decisions
        for name, value in statistics.items()
        if name not in ("decisions", "ratio_error")
    }


def step_metrics(gradient_norms: Sequence[float], max_grad_norm: float, lr: float) -> dict[str, float]:
    """Metrics of the optimizer steps. gradient_norms: L2 norms before clipping, NaN for a skipped step."""
    taken = [norm for norm in gradient_norms if not math.isnan(norm)]
    return {
        "train/grad_norm": sum(taken) / len(taken) if taken else 0.0,
        "train/optimizer_steps": len(taken),
        "train/skipped_steps": len(gradient_norms) - len(taken),
        "train/gradient_spikes": sum(norm > SPIKE_FACTOR * max_grad_norm for norm in taken),
        "train/lr": lr,
    }


# Reasons to stop


def drifted_too_far(epoch_sums: dict[str, float], target_kl: float | None) -> bool:
    """Whether the approximate KL of a whole epoch, in nats per token, exceeds `--target-kl`."""
    if target_kl is None:
        return False
    return epoch_sums.get("train/approx_kl", 0.0) / epoch_sums.get("decisions", 1) > target_kl


def check_skipped_steps(gradient_norms: Sequence[float], update_index: int) -> None:
    """Raise BadInput when MAX_SKIPPED_IN_A_ROW optimizer steps in a row were skipped, across epochs."""
    for is_skipped, steps in itertools.groupby(gradient_norms, math.isnan):
        if is_skipped and len(list(steps)) >= MAX_SKIPPED_IN_A_ROW:
            raise _diverged(f"{MAX_SKIPPED_IN_A_ROW} optimizer steps in a row", update_index)


def check_steps_taken(gradient_norms: Sequence[float], update_index: int) -> None:
    """Raise BadInput when all optimizer steps of an update were skipped."""
    if gradient_norms and all(math.isnan(norm) for norm in gradient_norms):
        raise _diverged(f"all {len(gradient_norms)} optimizer steps", update_index)


def _diverged(steps: str, update_index: int) -> BadInput:
    return BadInput(
        f"the training has diverged: update {update_index} had {steps} with a non-finite or enormous gradient, and is "
        "not saved; resume from an earlier checkpoint, or start again with a lower --lr or --max-grad-norm"
    )


def stop_without_signal(updates_without_signal: int) -> None:
    """Raise BadInput when all advantages were 0 in MAX_UPDATES_WITHOUT_SIGNAL updates in a row."""
    if updates_without_signal >= MAX_UPDATES_WITHOUT_SIGNAL:
        raise BadInput(
            f"no learning signal: all advantages of the last {updates_without_signal} updates were 0. Look at "
            "rollout/success_rate: near 0, start from a better checkpoint or raise --warmup-steps; near 1, the task is "
            "solved; or use more initial states or a larger --group-size"
        )
