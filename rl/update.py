"""One update: epochs of minibatches over a rollout, with exact gradient accumulation and gradient protection."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.config import TrainConfig
from contracts import BadInput, first_line
from rl import losses
from rl.critic import Critic, predict_values
from rl.phases import Phase, PhaseState, TeacherMode
from rl.ranks import ALONE, Ranks
from rl.rollout import torch_generator
from rl.trajectory import Batch, Trajectory
from vla.memory import shrink_batch

if TYPE_CHECKING:
    from vla.policy import Policy

ADAM_EPS = 1e-8  # AdamW's usual one
FIRST_RATIO_LIMIT = (
    0.05  # mean |ratio - 1| before any step; above it rollout and update disagree about the policy
)
SKIP_FACTOR = 1000.0  # x max_grad_norm: the step is skipped
WARN_FACTOR = 100.0  # x max_grad_norm: the step is counted as a spike
MAX_SKIPPED_IN_A_ROW = 20  # then the training has diverged
MAX_UPDATES_WITHOUT_SIGNAL = 10
OVER_ALL_ROWS = (
    "train/entropy",
    "train/approx_kl",
    "train/clip_fraction",
)  # at the end of an update, for SAMPLE_SIZE
SAMPLE_SIZE = 256  # rows, active or not: so these can be compared between kinds of advantage


@dataclass(frozen=True)
class Learner:
    """What is trained: the policy's adapters and their optimizer, with `--advantage gae` a critic; and who trains."""

    policy: Policy
    critic: Critic | None
    optimizer: torch.optim.Optimizer
    ranks: Ranks = ALONE  # every one of them has this learner, with the same numbers in it
    teacher_mode: TeacherMode = "greedy"  # how the policy's teacher decides


def make_learner(
    policy: Policy, config: TrainConfig, ranks: Ranks = ALONE, teacher_mode: TeacherMode = "greedy"
) -> Learner:
    """AdamW over the policy's trainable parameters, and a critic that has seen nothing."""
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
    optimizer = make_optimizer(parameters, config.update.lr, config.update.weight_decay)
    policy.watch(optimizer)
    critic = Critic() if config.loss.advantage == "gae" else None
    return Learner(policy, critic, optimizer, ranks, teacher_mode)


def make_optimizer(parameters: Sequence[Tensor], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Fused: one kernel for all parameters, and no other AdamW leaves out the steps that are marked as unusable.

    The moments are made now: in the first step, where AdamW would make them, they may find a GPU full of recorded
    passes, which give way to one another but not to an optimizer.
    """
    optimizer = torch.optim.AdamW(parameters, lr, eps=ADAM_EPS, weight_decay=weight_decay, fused=True)
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    return optimizer


def estimate_advantages(
    learner: Learner, batch: Batch, trajectories: Sequence[Trajectory], config: TrainConfig, number: int
) -> tuple[Tensor, dict[str, float]]:
    """(N,) advantages, by the configured rule or by the critic, with its metrics. It remembers the rollout afterwards.

    Those of a critic that has not seen an episode yet are those of `batch`.
    """
    critic, values = learner.critic, None
    if critic is not None:
        values = predict_values(critic, trajectories, config.run.seed, number)
        critic.remember(trajectories)
    if values is None:
        return losses.compute_advantages(batch, trajectories, config.loss), {}
    returns = torch.tensor([float(t.success) for t in trajectories])[batch.trajectory]
    metrics = {"train/explained_variance": losses.explained_variance(values, returns)}
    return losses.gae(values, batch, trajectories, config.loss.discount, config.loss.gae_lambda), metrics


def update(
    learner: Learner, batch: Batch, phase: PhaseState, config: TrainConfig, number: int,
    on_decisions: Callable[[int], None] = lambda _: None,
) -> dict[str, float]:  # fmt: skip
    """Minimise the phase's loss over `n_epochs` passes; returns the metrics. Raises BadInput for a diverged training.

    The loss is divided by the minibatch's size, inactive rows included: the gradient is what it would be if they ran.
    A minibatch without active rows takes no optimizer step (no momentum, no weight decay). All ranks come with the same
    batch, and each runs its share of a minibatch's active rows, perhaps none. After the first minibatch the GPU is not
    waited for within an epoch: what its steps were is read at the end.
    """
    started = time.perf_counter()
    policy, optimizer, ranks, settings = learner.policy, learner.optimizer, learner.ranks, config.update
    trained = optimizer.param_groups[0]["params"]
    warmup_lr = (
        settings.warmup_lr if phase.distils else None
    )  # imitation bears larger steps than reinforcement
    optimizer.param_groups[0]["lr"] = settings.lr if warmup_lr is None else warmup_lr
    active = rows_that_learn(batch, phase, config)
    data = complete(learner, batch, phase, config).to(policy.device)
    totals: dict[str, float] = {}
    norms: list[float] = []
    micro_batch_size, first_ratio_error = int(settings.micro_batch_size), None

    for epoch in range(settings.n_epochs):
        generator = torch_generator(config.run.seed, "minibatches", number, epoch)
        order = torch.randperm(len(batch), generator=generator).split(settings.batch_size)
        rows = [minibatch[active[minibatch]] for minibatch in order]
        minibatches = data[torch.cat(rows)].split([len(minibatch) for minibatch in rows])
        statistics: list[losses.Statistics] = []
        epoch_norms: list[Tensor] = []
        for minibatch, size in zip(minibatches, map(len, order), strict=True):
            on_decisions(size)
            if len(minibatch) == 0:
                continue
            share = minibatch[ranks.rank :: ranks.size]
            own, micro_batch_size = accumulate_gradient(learner, share, size, micro_batch_size, phase, config)
            if first_ratio_error is None and not phase.distils:
                first_ratio_error = check_first_ratio(_over_ranks(own, ranks))
            ranks.sum_gradients(trained)
            epoch_norms.append(optimizer_step(optimizer, settings.max_grad_norm))
            optimizer.zero_grad(set_to_none=True)
            statistics += own
        of_epoch = _over_ranks(statistics, ranks)
        totals = merged((totals, of_epoch))
        norms += torch.stack(epoch_norms).tolist() if epoch_norms else []
        skipped = (len(list(run)) for is_skipped, run in itertools.groupby(norms, math.isnan) if is_skipped)
        if max(skipped, default=0) >= MAX_SKIPPED_IN_A_ROW:
            raise _diverged(f"{MAX_SKIPPED_IN_A_ROW} optimizer steps in a row", number)
        approx_kl = of_epoch.get("train/approx_kl", 0.0) / of_epoch.get("decisions", 1)
        if settings.target_kl is not None and approx_kl > settings.target_kl:
            break

    ranks.check_same_parameters(trained)
    taken = [norm for norm in norms if not math.isnan(norm)]
    if norms and not taken:
        raise _diverged(f"all {len(norms)} optimizer steps", number)
    decisions = totals.pop("decisions", 0)
    metrics = {key: value if key.endswith("_max") else value / decisions for key, value in totals.items()}
    metrics.pop("ratio_error", None)
    if not phase.distils:
        metrics |= measure_sample(learner, data, micro_batch_size, phase, config, number)
    metrics |= {
        "train/grad_norm": sum(taken) / len(taken) if taken else 0.0,
        "train/optimizer_steps": len(taken),
        "train/skipped_steps": len(norms) - len(taken),
        "train/gradient_spikes": sum(norm > WARN_FACTOR * settings.max_grad_norm for norm in taken),
        "train/zero_advantage_fraction": 1.0 - active.float().mean().item(),
        "train/epochs": epoch + 1,
        "train/lr": optimizer.param_groups[0]["lr"],
        "train/time_s": time.perf_counter() - started,
    }
    if first_ratio_error is not None:
        metrics["train/first_ratio_error"] = first_ratio_error
    return metrics


def rows_that_learn(batch: Batch, phase: PhaseState, config: TrainConfig) -> Tensor:
    """(N,) bool, False for rows that cannot contribute a gradient and never run."""
    if phase.distils or config.loss.kl_coef > 0 or config.loss.entropy_coef > 0:
        return torch.ones(len(batch), dtype=torch.bool)
    return losses.policy_advantages(batch) != 0


def complete(learner: Learner, batch: Batch, phase: PhaseState, config: TrainConfig) -> Batch:
    """The batch with what the losses need beside the advantages: weights, teacher's tokens or log-probs (N, A, V)."""
    policy, size = learner.policy, int(config.update.micro_batch_size)
    by_trajectory = losses.weighs_trajectories(config.loss) and not phase.distils
    batch = replace(batch, weights=losses.decision_weights(batch, by_trajectory))
    if (
        phase.distils and phase.epsilon == 0
    ):  # the student has acted, and learns what the teacher would have done

        def tokens_of(rows: Tensor) -> Tensor:
            parts = batch[rows].split(size)
            answers = [policy.act_as_teacher(part.observations, learner.teacher_mode) for part in parts]
            return torch.cat([answer.tokens for answer in answers])

        batch = replace(batch, tokens=learner.ranks.divide(len(batch), tokens_of))
    if phase.distils or config.loss.kl_coef == 0:
        return batch
    temperature = config.rollout.temperature

    @torch.no_grad()
    def logprobs_of(rows: Tensor) -> Tensor:
        with policy.teacher() as teacher:
            logits = (teacher.chunk_logits(part.observations) for part in batch[rows].split(size))
            return torch.cat([F.log_softmax(part / temperature, dim=-1).cpu() for part in logits])

    return replace(batch, teacher_logprobs=learner.ranks.divide(len(batch), logprobs_of))


def accumulate_gradient(
    learner: Learner,
    minibatch: Batch,
    size: int,
    micro_batch_size: int,
    phase: PhaseState,
    config: TrainConfig,
) -> tuple[list[losses.Statistics], int]:
    """The gradient of a minibatch's mean loss over `size` rows, one micro-batch (and one graph in memory) at a time.

    Out of memory, it begins again with a smaller micro-batch, whose size it returns.
    """
    while True:
        statistics = []
        try:
            for micro in minibatch.split(micro_batch_size):
                loss_sum, of_micro = micro_batch_loss(learner, micro, phase, config)
                (loss_sum / size).backward()
                statistics.append(of_micro | {"decisions": loss_sum.new_full((), len(micro))})
            return statistics, micro_batch_size
        except torch.OutOfMemoryError as error:
            reason = first_line(error)
        # Outside of the handler, which keeps everything alive that the failed pass has computed.
        learner.optimizer.zero_grad(set_to_none=True)
        micro_batch_size = shrink_batch(learner.policy, micro_batch_size, reason, is_update=True)


def micro_batch_loss(
    learner: Learner, micro: Batch, phase: PhaseState, config: TrainConfig
) -> tuple[Tensor, losses.Statistics]:
    """What the phase minimises, summed over the rows of a micro-batch."""
    policy, temperature = learner.policy, config.rollout.temperature
    if phase.phase is Phase.SUPERVISED:
        logits, others = policy.logits_and_other_logsumexp(micro.observations)
        return losses.distillation_loss(logits, micro, others=others)
    logits = policy.chunk_logits(micro.observations)
    if phase.distils:
        return losses.distillation_loss(logits, micro, config.phases.distill_student_temperature)
    logprobs = policy.token_logprobs(logits, micro.tokens, temperature)
    return losses.ppo_loss(logits, logprobs, micro, config.loss, temperature)


@torch.no_grad()
def measure_sample(
    learner: Learner, batch: Batch, micro_batch_size: int, phase: PhaseState, config: TrainConfig, number: int
) -> dict[str, float]:
    """OVER_ALL_ROWS by the policy as it is now, over rows that are drawn from the whole rollout."""
    generator, ranks = torch_generator(config.run.seed, "statistics", number), learner.ranks
    rows = torch.randperm(len(batch), generator=generator)[:SAMPLE_SIZE]
    own = batch[rows[ranks.rank :: ranks.size]].split(micro_batch_size)
    found = _over_ranks([micro_batch_loss(learner, micro, phase, config)[1] for micro in own], ranks)
    return {name: found[name] / len(rows) for name in OVER_ALL_ROWS}


def optimizer_step(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """An optimizer step with the gradient scaled down to `max_norm`.

    Returns its norm before that, on the device; NaN where the device has left the step out, because the norm is not
    finite or beyond SKIP_FACTOR * max_norm. Fused AdamW knows such steps: torch.amp.GradScaler takes them so.
    """
    parameters = optimizer.param_groups[0]["params"]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).to(
        parameters[0].device
    )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    is_usable = norm <= SKIP_FACTOR * max_norm  # False for NaN, too
    optimizer.grad_scale, optimizer.found_inf = None, (~is_usable).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    return torch.where(is_usable, norm, torch.nan)


def merged(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Statistics of several micro-batches, or ranks, as those of one."""
    whole: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = (
                max(whole.get(key, value), value) if key.endswith("_max") else whole.get(key, 0.0) + value
            )
    return whole


def _over_ranks(parts: Sequence[losses.Statistics], ranks: Ranks) -> dict[str, float]:
    """Of all ranks' micro-batches; read from the device in one transfer."""
    found = [value for part in parts for value in part.values()]
    values = iter(torch.stack(found).tolist() if found else ())
    return merged(ranks.gather(merged({key: next(values) for key in part} for part in parts)))


def check_first_ratio(first: dict[str, float]) -> float:
    """The mean |ratio - 1| of the first minibatch, where the update must see the policy that acted."""
    error = first["ratio_error"] / first["decisions"]
    if not error <= FIRST_RATIO_LIMIT:  # also for NaN
        raise RuntimeError(
            f"first minibatch: mean |ratio - 1| = {error:.4f} before any optimizer step (limit {FIRST_RATIO_LIMIT}): "
            "the update does not see the policy that acted (its weights, temperature, preprocessing and precision)"
        )
    return error


def _diverged(what: str, number: int) -> BadInput:
    return BadInput(
        f"the training has diverged: update {number} had {what} with a non-finite or enormous gradient, and is not "
        "saved; resume from an earlier checkpoint, or start again with a lower --lr or --max-grad-norm"
    )


def check_signal(updates_without_signal: int) -> None:
    """Stop a run that has not had one non-zero advantage for many updates in a row."""
    if updates_without_signal >= MAX_UPDATES_WITHOUT_SIGNAL:
        raise BadInput(
            f"no learning signal: all advantages of the last {updates_without_signal} updates were 0. Look at "
            "rollout/success_rate: near 0, start from a better checkpoint or raise --warmup-steps; near 1, the task is "
            "solved; or use more initial states or a larger --group-size"
        )
