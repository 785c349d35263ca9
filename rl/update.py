"""One update: epochs of minibatches over a rollout.

The gradient of a minibatch is accumulated over micro-batches, and equals that of the whole minibatch computed at once.
A row is active if it can contribute a gradient (`rows_that_learn`). Inactive rows are not computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.config import TrainConfig
from configs.sections import LossConfig, UpdateConfig, WarmupTarget
from rl.critic import Critic
from rl.lessons import draw, remember
from rl.losses import SOFT_TEMPERATURE, distillation_loss, policy_advantages, ppo_loss
from rl.optimizer import (
    Statistics,
    accumulate_gradient,
    follow_kl,
    optimizer_step,
    rl_learning_rate,
)
from rl.phases import Phase, PhaseState
from rl.randomness import torch_generator
from rl.ranks import ALONE, Ranks
from rl.teacher import TeacherMode
from rl.trajectory import Batch
from rl.update_metrics import (
    check_diverged,
    check_first_ratios,
    mean_statistics,
    merge,
    step_metrics,
    student_kl,
    sum_statistics,
)

if TYPE_CHECKING:
    from vla.policy import Policy

# Of some rows -> their loss, summed, (), and statistics.
Loss = Callable[[Batch], tuple[Tensor, Statistics]]

SAMPLE_SIZE = 256  # decisions of the whole rollout, active or not, on which an update is measured at its end


@dataclass(frozen=True)
class Learner:
    """What an update changes (policy, optimizer, critic), and the ranks that train it together."""

    policy: Policy
    critic: Critic | None  # with `--advantage gae`
    optimizer: torch.optim.Optimizer
    ranks: Ranks = ALONE  # every rank holds a copy of this learner with the same values
    teacher_mode: TeacherMode = "greedy"  # how the policy's teacher decides
    lessons: list[Batch] = field(default_factory=list)  # of a warmup in which the student acts (`rl.lessons`)


def make_learner(
    policy: Policy, config: TrainConfig, ranks: Ranks = ALONE, teacher_mode: TeacherMode = "greedy"
) -> Learner:
    """Build a learner: AdamW over the policy's trainable parameters, and an empty critic for `--advantage gae`."""
    optimizer = policy.make_optimizer(config.update.lr, config.update.weight_decay)
    critic = Critic() if config.loss.advantage == "gae" else None
    return Learner(policy, critic, optimizer, ranks, teacher_mode)


@dataclass
class Progress:
    """What the epochs of an update have done so far."""

    micro_batch_size: int  # smaller once memory has run out
    sums: dict[str, float] = field(default_factory=dict)  # statistics over all ranks and epochs
    # L2 norms before clipping, of all optimizer steps; NaN where one was skipped.
    gradient_norms: list[float] = field(default_factory=list)
    first_ratios: dict[str, float] = field(default_factory=dict)  # metrics; none in the warmup


def update(
    learner: Learner,
    batch: Batch,
    phase: PhaseState,
    config: TrainConfig,
    update_index: int,
    on_decisions: Callable[[int], None] = lambda decisions: None,
) -> dict[str, float]:
    """Minimise the phase's loss in epochs, and return the update's metrics. Raises BadInput if training has diverged.

    The loss is divided by the minibatch's size including inactive rows, so skipping them does not change the gradient.
    A minibatch without active rows takes no step. Every rank computes a slice of each minibatch, which may be empty.
    """
    started = time.perf_counter()
    optimizer = learner.optimizer
    settings = config.update
    loss = choose_loss(learner.policy, phase, config)
    optimizer.param_groups[0]["lr"] = learning_rate(optimizer, settings, phase)
    active = rows_that_learn(batch, phase, config.loss)
    batch = prepare_batch(learner, batch, phase, config).to(learner.policy.device)
    progress = Progress(int(settings.micro_batch_size))
    for epoch in range(number_of_epochs(settings, phase)):
        generator = torch_generator(config.run.seed, "minibatches", update_index, epoch)
        rows_of_epoch = draw(batch, len(active), generator)
        minibatches = draw_minibatches(rows_of_epoch, active, settings.batch_size, generator)
        norms = run_epoch(learner, minibatches, loss, settings.max_grad_norm, progress, on_decisions)
        check_diverged(norms, update_index)

    learner.ranks.check_same_parameters(optimizer.param_groups[0]["params"])
    metrics = progress.first_ratios | mean_statistics(progress.sums)
    metrics |= step_metrics(progress.gradient_norms, settings.max_grad_norm)
    metrics["train/lr"] = optimizer.param_groups[0]["lr"]
    if not phase.distils:
        generator = torch_generator(config.run.seed, "statistics", update_index)
        metrics |= measure_sample(learner.ranks, batch, loss, progress.micro_batch_size, generator)
    if phase.phase is Phase.RL and progress.gradient_norms:
        follow_kl(optimizer, metrics.get("train/approx_kl"), settings)
    metrics["train/time_s"] = time.perf_counter() - started
    return metrics


def choose_loss(policy: Policy, phase: PhaseState, config: TrainConfig) -> Loss:
    """The loss that an update of the phase minimises, as a function of a micro-batch."""
    if phase.distils:
        return partial(imitation, policy, config.phases.warmup_target)
    return partial(reinforcement, policy, config.loss, config.rollout.temperature)


def imitation(policy: Policy, target: WarmupTarget, micro_batch: Batch) -> tuple[Tensor, Statistics]:
    """The loss of the warmup."""
    if target == "soft":
        # Before the student's pass, because none may run between that and its backward pass (`vla.cuda_graphs`).
        with torch.no_grad():
            logits = policy.teacher_logits(micro_batch.observations, micro_batch.kept)
        micro_batch = replace(micro_batch, teacher_logprobs=F.log_softmax(logits / SOFT_TEMPERATURE, dim=-1))
    logits = policy.chunk_logits(micro_batch.observations, micro_batch.kept)
    return distillation_loss(logits, micro_batch, target)


def reinforcement(
    policy: Policy, config: LossConfig, temperature: float, micro_batch: Batch
) -> tuple[Tensor, Statistics]:
    """PPO's loss. temperature: the student's when it sampled."""
    logits = policy.chunk_logits(micro_batch.observations, micro_batch.kept)
    logprobs = policy.token_logprobs(logits, micro_batch.tokens, temperature)
    return ppo_loss(logits, logprobs, micro_batch, config, temperature)


def run_epoch(
    learner: Learner,
    minibatches: Iterable[tuple[Batch, int]],
    loss: Loss,
    max_grad_norm: float,
    progress: Progress,
    on_decisions: Callable[[int], None],
) -> list[float]:
    """Take an optimizer step on each minibatch that has active rows, update `progress`, and return the gradient norms.

    minibatches: see `draw_minibatches`.
    """
    ranks = learner.ranks
    optimizer = learner.optimizer
    statistics: list[Statistics] = []
    norms: list[Tensor] = []
    for minibatch, size in minibatches:
        on_decisions(size)
        if len(minibatch) == 0:  # a step would still apply momentum and weight decay
            continue
        rows_of_rank = minibatch[ranks.rank :: ranks.size]
        progress.micro_batch_size, minibatch_statistics = accumulate_gradient(
            learner.policy,
            optimizer,
            len(rows_of_rank),
            partial(part_of_loss, loss, rows_of_rank, size),
            progress.micro_batch_size,
        )
        if not norms and not progress.gradient_norms:  # no step was taken yet
            progress.first_ratios = check_first_ratios(sum_statistics(minibatch_statistics, ranks))
        ranks.sum_gradients(optimizer.param_groups[0]["params"])
        norms.append(optimizer_step(optimizer, max_grad_norm))
        optimizer.zero_grad(set_to_none=True)
        statistics += minibatch_statistics
    sums = sum_statistics(statistics, ranks)  # here the CPU waits for the GPU
    progress.sums = merge([progress.sums, sums])
    norms_of_epoch = torch.stack(norms).tolist() if norms else []
    progress.gradient_norms += norms_of_epoch
    return norms_of_epoch


def part_of_loss(loss: Loss, minibatch: Batch, size: int, rows: slice) -> tuple[Tensor, Statistics]:
    """The part of a minibatch's mean loss that comes from some of its rows. `size` counts inactive rows, too."""
    micro_batch = minibatch[rows]
    loss_sum, statistics = loss(micro_batch)
    return loss_sum / size, statistics | {"decisions": loss_sum.new_full((), len(micro_batch))}


def learning_rate(optimizer: torch.optim.Optimizer, settings: UpdateConfig, phase: PhaseState) -> float:
    """The learning rate of an update. Imitation tolerates larger steps than RL, so the warmup may have its own."""
    if phase.distils:
        return float(settings.warmup_lr)
    return rl_learning_rate(optimizer, settings.lr)


def number_of_epochs(settings: UpdateConfig, phase: PhaseState) -> int:
    """The passes of an update over its decisions."""
    return int(settings.warmup_epochs) if phase.distils else settings.n_epochs


def rows_that_learn(batch: Batch, phase: PhaseState, config: LossConfig) -> Tensor:
    """Which rows are active: (N,) bool, False for rows that cannot contribute a gradient, which are not computed."""
    if phase.distils or config.kl_coef > 0 or config.entropy_coef > 0:
        return torch.ones(len(batch), dtype=torch.bool)
    return policy_advantages(batch) != 0


def prepare_batch(learner: Learner, batch: Batch, phase: PhaseState, config: TrainConfig) -> Batch:
    """Add to the batch what its loss needs of the teacher, tokens or log-probs, and earlier rollouts of the warmup."""
    micro_batch_size = int(config.update.micro_batch_size)
    if phase.needs_teacher_labels:
        tokens = ask_teacher(learner, batch, micro_batch_size)
        return remember(learner.lessons, replace(batch, tokens=tokens))
    learner.lessons.clear()
    if config.loss.kl_coef > 0 and not phase.distils:
        logprobs = ask_teacher(learner, batch, micro_batch_size, config.rollout.temperature)
        batch = replace(batch, teacher_logprobs=logprobs)
    return batch


@torch.no_grad()
def ask_teacher(
    learner: Learner, batch: Batch, micro_batch_size: int, temperature: float | None = None
) -> Tensor:
    """What the teacher makes of the batch's observations. Each rank asks it for a part of the rows.

    temperature: at which its log-probs are wanted, (N, A, V) on the CPU; None: the tokens that it chooses, (N, A).
    """
    answers: list[Tensor] = []
    for part in batch[learner.ranks.rows_of_rank(len(batch))].split(micro_batch_size):
        if temperature is None:
            acted = learner.policy.act_as_teacher(part.observations, learner.teacher_mode, part.kept)
            answers.append(acted.tokens)
        else:
            logits = learner.policy.teacher_logits(part.observations, part.kept)
            answers.append(F.log_softmax(logits / temperature, dim=-1).cpu())
    return learner.ranks.join_rows(torch.cat(answers), len(batch))


def draw_minibatches(
    batch: Batch, active: Tensor, batch_size: int, generator: torch.Generator
) -> Iterator[tuple[Batch, int]]:
    """Deal all rows into random minibatches. Yields each one's active rows, and its size with the inactive ones.

    The minibatches are equal parts of the rows, of at most `batch_size`: a remainder of a few rows would take a whole
    optimizer step, too, and Adam's steps are as long for a noisy gradient. The rows of the whole epoch are gathered at
    once. The minibatches are views of them, so that taking one does not make the CPU wait for the GPU.
    """
    num_minibatches = math.ceil(len(batch) / batch_size)
    minibatches = torch.randperm(len(batch), generator=generator).tensor_split(num_minibatches)
    active_rows = [rows[active[rows]] for rows in minibatches]
    parts = batch[torch.cat(active_rows)].split([len(rows) for rows in active_rows])
    return zip(parts, map(len, minibatches), strict=True)


@torch.no_grad()
def measure_sample(
    ranks: Ranks, batch: Batch, loss: Loss, micro_batch_size: int, generator: torch.Generator
) -> dict[str, float]:
    """Measure entropy, clip fraction and KL of the updated policy, over rows drawn from the whole rollout.

    Inactive rows count too, so that kinds of advantage can be compared. The KL is that of the student's own decisions,
    and is left out if none was drawn. The share of advantages that are 0 is of all rows.
    """
    rows = torch.randperm(len(batch), generator=generator)[:SAMPLE_SIZE]
    rows_of_rank = batch[rows[ranks.rank :: ranks.size]]
    statistics = [loss(micro_batch)[1] for micro_batch in rows_of_rank.split(micro_batch_size)]
    sums = sum_statistics(statistics, ranks)
    metrics = {f"train/{name}": sums[name] / len(rows) for name in ("entropy", "clip_fraction")}
    metrics["train/zero_advantage_fraction"] = (policy_advantages(batch) == 0).float().mean().item()
    kl = student_kl(sums)
    return metrics if kl is None else metrics | {"train/approx_kl": kl}
