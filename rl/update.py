"""One update: epochs of minibatches over a rollout, with exact gradient accumulation and gradient protection."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from configs.config import UpdateConfig
from errors import BadInput
from rl.contracts import Policy
from rl.losses import Statistics
from rl.objectives import Objective
from rl.out_of_memory import AtOnce, first_line
from rl.randomness import torch_generator
from rl.ranks import ALONE, Ranks
from rl.selfcheck import check_same_parameters
from rl.trajectory import Batch

FIRST_RATIO_LIMIT = 0.05  # mean |ratio - 1| before any step; above it rollout and update disagree about the policy
SKIP_FACTOR = 1000.0  # x max_grad_norm: the step is skipped
MAX_SKIPPED_IN_A_ROW = 20  # then the training has diverged
WARN_FACTOR = 100.0  # x max_grad_norm: the step is counted as a spike


@dataclass
class _Totals:
    """Statistics summed over micro-batches."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    decisions: int = 0

    def add(self, other: _Totals) -> None:
        for key, value in other.sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        for key, value in other.maxima.items():
            self.maxima[key] = max(self.maxima.get(key, -torch.inf), value)
        self.decisions += other.decisions

    def mean(self, key: str) -> float:
        return self.sums[key] / self.decisions


@dataclass
class _Steps:
    """What has become of an update's optimizer steps."""

    norms: list[float] = field(default_factory=list)  # of the gradients of those that were taken
    skipped: int = 0
    skipped_in_a_row: int = 0

    def add(self, norms: Sequence[float], update: int) -> None:
        """norms: one for each further step, NaN for those that were not taken."""
        for norm in norms:
            if not math.isnan(norm):
                self.norms.append(norm)
                self.skipped_in_a_row = 0
                continue
            self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
            if self.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                raise _diverged(f"{self.skipped_in_a_row} optimizer steps in a row", update)


def optimise(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, objective: Objective, config: UpdateConfig,
    seed: int, update: int, ranks: Ranks = ALONE, on_decisions: Callable[[int], None] = lambda _: None,
) -> dict[str, float]:  # fmt: skip
    """Minimise the objective over `n_epochs` passes; returns the metrics of SPEC section 9.

    Every decision belongs to a minibatch, and the loss is divided by the minibatch's size, inactive rows included: the
    gradient is what it would be if they ran. A minibatch without active rows takes no optimizer step (no momentum, no
    weight decay). Raises RuntimeError when the first minibatch's ratios are not 1, and BadInput when the training has
    diverged: no step, or none of many in a row, had a usable gradient, or a parameter is not finite.

    All ranks come with the same batch and objective. Each runs its share of a minibatch's active rows, perhaps none of
    them; the statistics and gradients of all are added up, so every rank takes the same step or none.

    After the first minibatch one GPU is not waited for within an epoch: what its steps were is read at the end.
    """
    started = time.perf_counter()
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    totals, steps = _Totals(), _Steps()
    at_once = AtOnce(config.micro_batch, learning=True)
    first_ratio_error: float | None = None

    for epoch in range(config.n_epochs):
        statistics: list[Statistics] = []
        norms: list[Tensor] = []
        order = torch.randperm(len(batch), generator=torch_generator(seed, "minibatches", update, epoch))
        for minibatch in order.split(config.batch_size):
            on_decisions(len(minibatch))
            rows = minibatch[objective.active[minibatch]]
            if len(rows) == 0:
                continue
            own = _accumulate_gradient(policy, optimizer, batch, objective, ranks.share(rows), len(minibatch), at_once)
            if ranks.shard_base:
                _keep_step(policy, batch, objective, rows, config, ranks)
            if epoch == 0 and not norms:
                first_ratio_error = _checked_ratio_error(_united(ranks.gather(_read(own))))
            ranks.sum_gradients(trained)
            norms.append(_step(optimizer, config.max_grad_norm))
            policy.parameters_changed()
            optimizer.zero_grad(set_to_none=True)
            statistics += own
        of_epoch = _united(ranks.gather(_read(statistics)))
        steps.add(torch.stack(norms).tolist() if norms else [], update)
        totals.add(of_epoch)
        if _drifted(of_epoch, config.target_kl):
            break

    check_same_parameters(trained, ranks)
    if steps.skipped and not steps.norms:
        raise _diverged(f"all {steps.skipped} optimizer steps", update)
    named = policy.named_trainable_parameters()
    finite = torch.stack([torch.isfinite(parameter).all() for _, parameter in named]).tolist()
    for (name, _), is_finite in zip(named, finite, strict=True):
        if not is_finite:
            raise _diverged(f"steps after which {name} is not finite", update)
    metrics = {key: totals.mean(key) for key in totals.sums if key != "ratio_error"} | totals.maxima
    metrics |= {
        "train/grad_norm": sum(steps.norms) / len(steps.norms) if steps.norms else 0.0,
        "train/optimizer_steps": len(steps.norms),
        "train/skipped_steps": steps.skipped,
        "train/gradient_spikes": sum(norm > WARN_FACTOR * config.max_grad_norm for norm in steps.norms),
        "train/zero_advantage_fraction": 1.0 - objective.active.float().mean().item(),
        "train/epochs": epoch + 1,
        "train/lr": optimizer.param_groups[0]["lr"],
        "train/time_s": time.perf_counter() - started,
    }
    if first_ratio_error is not None:
        metrics["train/first_ratio_error"] = first_ratio_error
    return metrics


def _diverged(what: str, update: int) -> BadInput:
    return BadInput(
        f"the training has diverged: update {update} had {what} with a non-finite or enormous gradient, and is not "
        "saved; resume from an earlier checkpoint, or start again with a lower --lr or --max-grad-norm"
    )


def _read(parts: Sequence[Statistics]) -> _Totals:
    """The sums of what is on the device, in one transfer."""
    found = [value for part in parts for value in (*part.sums.values(), *part.maxima.values())]
    values = iter(torch.stack(found).tolist() if found else ())
    whole = _Totals()
    for part in parts:
        sums, maxima = ({key: next(values) for key in of_part} for of_part in (part.sums, part.maxima))
        whole.add(_Totals(sums, maxima, part.decisions))
    return whole


def _united(parts: Sequence[_Totals]) -> _Totals:
    whole = _Totals()
    for part in parts:
        whole.add(part)
    return whole


def _accumulate_gradient(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, objective: Objective, rows: Tensor,
    minibatch_size: int, at_once: AtOnce,
) -> list[Statistics]:  # fmt: skip
    """The gradient of the minibatch's mean loss, one micro-batch (and one graph in memory) per device at a time.

    Out of memory, it begins again, from no gradient, with a smaller micro-batch.
    """
    while True:
        try:
            return _run_micro_batches(policy, batch, objective, rows, minibatch_size, at_once.size)
        except torch.OutOfMemoryError as error:
            reason = first_line(error)
        # Outside of the handler, which keeps everything alive that the failed pass has computed.
        optimizer.zero_grad(set_to_none=True)
        at_once.lower(policy, reason)


def _run_micro_batches(
    policy: Policy, batch: Batch, objective: Objective, rows: Tensor, minibatch_size: int, size: int
) -> list[Statistics]:
    outputs_of = objective.outputs or policy.chunk_logits
    parts = []
    for micro in rows.split(size * len(policy.devices)) if len(rows) else ():
        outputs = outputs_of([batch.observations[i] for i in micro])
        loss_sum, statistics = objective.loss(outputs, micro)
        (loss_sum / minibatch_size).backward()
        parts.append(statistics)
    policy.reduce_gradients()
    return parts


def _keep_step(
    policy: Policy, batch: Batch, objective: Objective, rows: Tensor, config: UpdateConfig, ranks: Ranks
) -> None:
    """As many further passes, without effect, as rank 0 has more micro-batches: a sharded base runs everywhere."""
    own, of_rank_0 = (-(-len(part) // config.micro_batch) for part in (ranks.share(rows), rows[:: ranks.size]))
    for _ in range(of_rank_0 - own):
        outputs = (objective.outputs or policy.chunk_logits)([batch.observations[rows[0]]])
        (0 * objective.loss(outputs, rows[:1])[0]).backward()


def _step(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """An optimizer step with the gradient of each parameter group (policy; critic) scaled down to `max_norm`.

    Returns the policy's norm before that, on the device; NaN where the device has left the step out, because a norm is
    not finite or beyond SKIP_FACTOR * max_norm. Fused AdamW knows such steps: torch.amp.GradScaler takes them so.
    """
    norms = []
    for group in optimizer.param_groups:
        gradients = [p.grad for p in group["params"] if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).to(group["params"][0].device))
        torch.nn.utils.clip_grads_with_norm_(group["params"], max_norm, norms[-1])
    every_norm = torch.stack(norms)
    is_usable = (every_norm <= SKIP_FACTOR * max_norm).all()  # False for NaN, too
    optimizer.grad_scale, optimizer.found_inf = None, (~is_usable).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    return torch.where(is_usable, every_norm[0], torch.nan)


def _drifted(of_epoch: _Totals, target_kl: float | None) -> bool:
    """Whether the approximate KL of a whole epoch exceeds the bound (never for distillation, which has none)."""
    if target_kl is None or "train/approx_kl" not in of_epoch.sums:
        return False
    return of_epoch.mean("train/approx_kl") > target_kl


def _checked_ratio_error(first: _Totals) -> float | None:
    """Of the first minibatch of an update that has ratios."""
    if "ratio_error" not in first.sums:
        return None
    error = first.mean("ratio_error")
    if not error <= FIRST_RATIO_LIMIT:  # also true for NaN
        raise RuntimeError(
            f"first minibatch: mean |ratio - 1| = {error:.4f} before any optimizer step (limit {FIRST_RATIO_LIMIT}): "
            "the update does not see the policy that acted. Rollout and update must use the same weights, temperature, "
            "preprocessing and precision"
        )
    return error
