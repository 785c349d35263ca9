"""One update: epochs of optimizer steps on the decisions of a rollout.

The path of a gradient: `update` deals the decisions of each epoch into minibatches; `run_epoch` takes an optimizer step
on each; `accumulate_gradient` divides a minibatch into micro-batches that fit into memory; `add_gradient` computes the
gradient of one of them, and `Objective.loss` its loss, by the formulas in rl/losses.py.

A decision is active if it can contribute a gradient (`Objective.is_active`); the others are not computed.

What bounds how far one update moves the policy:
  clip_low, clip_high   once a token's probability (with --ratio-level chunk, a chunk's) has changed by this share in
                        the direction that its advantage asks for, it has no gradient any more (rl/losses.py)
  max_grad_norm         the gradient of each step is scaled down to this norm; or skipped, if broken (`optimizer_step`)
  desired_kl            the learning rate of the next update follows the KL that this one has measured (`follow_kl`)
No limit of KL ends an update early: it takes all its epochs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.config import TrainConfig
from configs.sections import UpdateConfig
from rl.critic import Critic
from rl.lessons import draw, remember
from rl.losses import SOFT_TEMPERATURE, Statistics, distillation_loss, policy_advantages, ppo_loss
from rl.optimizer_step import follow_kl, optimizer_step, rl_learning_rate
from rl.phases import Phase, PhaseState
from rl.randomness import torch_generator
from rl.ranks import ALONE, Ranks
from rl.teacher_choice import TeacherMode
from rl.trajectory import Batch
from rl.update_metrics import (
    MEASURED_AFTERWARDS,
    check_diverged,
    check_first_ratios,
    mean_statistics,
    merge,
    step_metrics,
    student_kl,
    sum_statistics,
)
from vla.pass_sizes import pass_sizes, shrink_until_it_fits
from vla.tokens import NUM_BINS, token_logprobs

if TYPE_CHECKING:
    from vla.policy import Policy

SAMPLE_SIZE = 256  # decisions of the whole rollout, active or not, on which an update is measured at its end


@dataclass
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


@dataclass(frozen=True)
class Objective:
    """What an update minimises, with all that its loss needs."""

    policy: Policy
    phase: PhaseState
    config: TrainConfig

    def loss(self, decisions: Batch) -> tuple[Tensor, Statistics]:
        """The sum of the decisions' losses, (), and statistics: imitation in the warmup, PPO afterwards."""
        logits = self.policy.chunk_logits(decisions.observations, decisions.kept)
        if self.phase.distils:
            target = self.config.phases.warmup_target
            assert target != "auto"  # `settle_warmup` has replaced it
            return distillation_loss(logits, decisions, target)
        temperature = self.config.rollout.temperature
        logprobs = token_logprobs(logits, decisions.tokens, temperature)
        return ppo_loss(logits, logprobs, decisions, self.config.loss, temperature)

    def is_active(self, decisions: Batch) -> Tensor:
        """Which decisions can contribute a gradient, (N,) bool: all, unless PPO's surrogate is the only term."""
        loss = self.config.loss
        if self.phase.distils or loss.kl_coef > 0 or loss.entropy_coef > 0:
            return torch.ones(len(decisions), dtype=torch.bool)
        return policy_advantages(decisions) != 0


@dataclass(frozen=True)
class Minibatch:
    """The decisions of one optimizer step."""

    active: Batch  # those that can contribute a gradient; only these are computed
    size: int  # the number of all its decisions, over which the loss is a mean


@dataclass
class Progress:
    """What the epochs of an update have done so far."""

    micro_batch_size: int  # smaller once memory has run out, see `shrink_until_it_fits`
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

    The loss is divided by the minibatch's size including inactive decisions, so skipping them does not change the
    gradient. Every rank holds the whole batch, and computes a slice of each minibatch, which may be empty.
    """
    started = time.perf_counter()
    settings = config.update
    optimizer = learner.optimizer
    learning_rate = float(settings.warmup_lr) if phase.distils else rl_learning_rate(optimizer, settings.lr)
    optimizer.param_groups[0]["lr"] = learning_rate
    objective = Objective(learner.policy, phase, config)
    rollout_size = len(batch)  # below, a warmup's batch may have the decisions of earlier rollouts, too
    batch = prepare_batch(learner, batch, phase, config)
    progress = Progress(int(settings.micro_batch_size))
    for epoch in range(number_of_epochs(settings, phase)):
        generator = torch_generator(config.run.seed, "minibatches", update_index, epoch)
        decisions = draw(batch, rollout_size, generator)
        minibatches = draw_minibatches(objective, decisions, settings.batch_size, generator)
        norms = run_epoch(learner, objective, minibatches, progress, on_decisions)
        check_diverged(norms, update_index)

    learner.ranks.check_same_parameters(optimizer.param_groups[0]["params"])
    metrics = progress.first_ratios | mean_statistics(progress.sums)
    metrics |= step_metrics(progress.gradient_norms, settings.max_grad_norm)
    metrics["train/lr"] = learning_rate
    if not phase.distils:
        generator = torch_generator(config.run.seed, "statistics", update_index)
        metrics |= measure_sample(objective, batch, progress.micro_batch_size, generator, learner.ranks)
    if phase.phase is Phase.RL and progress.gradient_norms:
        follow_kl(optimizer, metrics.get("train/approx_kl"), settings)
    metrics["train/time_s"] = time.perf_counter() - started
    return metrics


def number_of_epochs(settings: UpdateConfig, phase: PhaseState) -> int:
    """The passes of an update over its decisions."""
    return int(settings.warmup_epochs) if phase.distils else settings.n_epochs


def draw_minibatches(
    objective: Objective, decisions: Batch, batch_size: int, generator: torch.Generator
) -> list[Minibatch]:
    """Deal the decisions of an epoch into random minibatches, and put the active ones on the policy's device.

    The minibatches are equal parts of the epoch, of at most `batch_size` decisions: a remainder of a few would take a
    whole optimizer step, too, and Adam's steps are as long for a noisy gradient. The active decisions of the epoch are
    moved at once, and the minibatches are views of them, so that taking one does not make the CPU wait for the GPU.
    """
    num_minibatches = math.ceil(len(decisions) / batch_size)
    minibatches = torch.randperm(len(decisions), generator=generator).tensor_split(num_minibatches)
    is_active = objective.is_active(decisions)
    active_rows = [rows[is_active[rows]] for rows in minibatches]
    active_of_epoch = decisions[torch.cat(active_rows)].to(objective.policy.device)
    parts = active_of_epoch.split([len(rows) for rows in active_rows])
    return [Minibatch(part, len(rows)) for part, rows in zip(parts, minibatches, strict=True)]


def run_epoch(
    learner: Learner,
    objective: Objective,
    minibatches: Sequence[Minibatch],
    progress: Progress,
    on_decisions: Callable[[int], None],
) -> list[float]:
    """Take an optimizer step on each minibatch, update `progress`, and return the gradient norms of the steps."""
    optimizer = learner.optimizer
    ranks = learner.ranks
    statistics: list[Statistics] = []
    norms: list[Tensor] = []
    for minibatch in minibatches:
        on_decisions(minibatch.size)
        if len(minibatch.active) == 0:  # a step would still apply momentum and weight decay
            continue
        minibatch_statistics = accumulate_gradient(learner, objective, minibatch, progress)
        if not norms and not progress.gradient_norms:  # no step was taken yet
            progress.first_ratios = check_first_ratios(sum_statistics(minibatch_statistics, ranks))
        ranks.sum_gradients(optimizer.param_groups[0]["params"])
        norms.append(optimizer_step(optimizer, objective.config.update.max_grad_norm))
        optimizer.zero_grad(set_to_none=True)
        statistics += minibatch_statistics
    sums = sum_statistics(statistics, ranks)  # here the CPU waits for the GPU
    progress.sums = merge([progress.sums, sums])
    norms_of_epoch = torch.stack(norms).tolist() if norms else []
    progress.gradient_norms += norms_of_epoch
    return norms_of_epoch


def accumulate_gradient(
    learner: Learner, objective: Objective, minibatch: Minibatch, progress: Progress
) -> list[Statistics]:
    """Compute this rank's part of the gradient of a minibatch. Returns the statistics of each micro-batch.

    If memory runs out, the minibatch starts again with smaller micro-batches. Raises BadInput when even the smallest
    does not fit.
    """
    policy = learner.policy
    decisions = minibatch.active[learner.ranks.rank :: learner.ranks.size]

    def accumulate(micro_batch_size: int) -> list[Statistics]:
        learner.optimizer.zero_grad(set_to_none=True)  # what a first try has added
        sizes = pass_sizes(len(decisions), micro_batch_size, policy.few_sizes)
        return [add_gradient(objective, part, minibatch.size) for part in decisions.split(sizes)]

    progress.micro_batch_size, statistics = shrink_until_it_fits(
        policy.network, progress.micro_batch_size, accumulate, learns=True
    )
    return statistics


def add_gradient(objective: Objective, micro_batch: Batch, minibatch_size: int) -> Statistics:
    """Add the gradient of a micro-batch's part of the minibatch's mean loss. Returns the micro-batch's statistics.

    The autograd graph ends with this function. It must be gone before the next micro-batch, which may have another size
    and then be recorded as a CUDA graph (see `vla.cuda_graphs`).
    """
    loss_sum, statistics = objective.loss(micro_batch)
    (loss_sum / minibatch_size).backward()
    return statistics | {"decisions": loss_sum.new_full((), len(micro_batch))}


def prepare_batch(learner: Learner, batch: Batch, phase: PhaseState, config: TrainConfig) -> Batch:
    """Add the teacher's tokens or log-probs where the loss needs them, and remember or join or forget the lessons."""
    micro_batch_size = int(config.update.micro_batch_size)
    if phase.needs_teacher_labels:
        batch = replace(batch, tokens=teacher_tokens(learner, batch, micro_batch_size))
    if phase.distils and config.phases.warmup_target == "soft":
        logprobs = teacher_logprobs(learner, batch, micro_batch_size, SOFT_TEMPERATURE)
        batch = replace(batch, teacher_logprobs=logprobs)
    elif config.loss.kl_coef > 0 and not phase.distils:
        logprobs = teacher_logprobs(learner, batch, micro_batch_size, config.rollout.temperature)
        batch = replace(batch, teacher_logprobs=logprobs)
    if phase.needs_teacher_labels:
        return remember(learner.lessons, batch)
    learner.lessons.clear()
    return batch


def teacher_tokens(learner: Learner, batch: Batch, micro_batch_size: int) -> Tensor:
    """The tokens (N, A) that the teacher chooses for the batch's observations. Each rank asks it for some of them."""
    tokens = [batch.tokens[:0]]
    for part in batch[learner.ranks.rows_of_rank(len(batch))].split(micro_batch_size):
        acted = learner.policy.act_as_teacher(part.observations, learner.teacher_mode, part.kept)
        tokens.append(acted.tokens)
    return torch.cat(learner.ranks.gather(torch.cat(tokens)))


@torch.no_grad()
def teacher_logprobs(learner: Learner, batch: Batch, micro_batch_size: int, temperature: float) -> Tensor:
    """The teacher's log-probs (N, A, V) at a temperature, on the CPU. Each rank computes a part of the rows."""
    logprobs = [torch.empty(0, batch.tokens.shape[1], NUM_BINS)]
    for part in batch[learner.ranks.rows_of_rank(len(batch))].split(micro_batch_size):
        with learner.policy.teacher():
            logits = learner.policy.chunk_logits(part.observations, part.kept)
        logprobs.append(F.log_softmax(logits / temperature, dim=-1).cpu())
    return torch.cat(learner.ranks.gather(torch.cat(logprobs)))


@torch.no_grad()
def measure_sample(
    objective: Objective, batch: Batch, micro_batch_size: int, generator: torch.Generator, ranks: Ranks
) -> dict[str, float]:
    """Measure entropy, clip fraction and KL of the updated policy, over decisions drawn from the whole rollout.

    Inactive ones count too, so that kinds of advantage can be compared. The KL is that of the student's own decisions,
    and is left out if none was drawn. The share of advantages that are 0 is of all decisions.
    """
    rows = torch.randperm(len(batch), generator=generator)[:SAMPLE_SIZE]
    decisions = batch[rows[ranks.rank :: ranks.size]].to(objective.policy.device)
    statistics = [objective.loss(micro_batch)[1] for micro_batch in decisions.split(micro_batch_size)]
    sums = sum_statistics(statistics, ranks)
    metrics = {name: sums[name] / len(rows) for name in MEASURED_AFTERWARDS}
    metrics["train/zero_advantage_fraction"] = (policy_advantages(batch) == 0).float().mean().item()
    kl = student_kl(sums)
    return metrics if kl is None else metrics | {"train/approx_kl": kl}
