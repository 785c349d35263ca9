"""An optimizer step: clipping and AdamW; and the learning rate that follows KL.

Reinforcement learning and supervised training take the same step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from configs.sections import UpdateConfig

SKIP_FACTOR = 1000.0  # times max_grad_norm: a step with a larger gradient is skipped
RL_LR = "rl_lr"  # in the optimizer's only parameter group: RL's learning rate, saved with its state
MAX_LR_CHANGE = 3.0  # by which one update can raise or lower RL's learning rate
# RL's learning rate never exceeds this times --lr. Small policies needed up to 80 times 3e-5.
MAX_LR_GROWTH = 100.0


def optimizer_step(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """Clip the gradient to an L2 norm of at most `max_norm`, and take a step. Returns the norm before clipping, ().

    If the norm is not finite or above SKIP_FACTOR * max_norm, the step is skipped and NaN is returned. This is decided
    on the device, so that the CPU need not wait for it: fused AdamW skips a step where `found_inf` is 1, the way
    torch.amp.GradScaler does it.
    """
    parameters = optimizer.param_groups[0]["params"]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).to(parameters[0].device)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    is_usable = norm <= SKIP_FACTOR * max_norm  # also False for NaN
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = (~is_usable).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    return torch.where(is_usable, norm, torch.nan)


def rl_learning_rate(optimizer: torch.optim.Optimizer, initial: float) -> float:
    """RL's present learning rate: what `follow_kl` chose after the last RL update, and `initial` before the first."""
    return optimizer.param_groups[0].get(RL_LR, initial)


def follow_kl(optimizer: torch.optim.Optimizer, kl: float | None, settings: UpdateConfig) -> None:
    """Choose RL's next learning rate, so that an update moves the policy by about `desired_kl` nats per token.

    kl: how far the last update moved the policy, in nats per token. If it is None or NaN, or without `desired_kl`, the
    learning rate stays. The measured KL of an update grows nearly in proportion to the learning rate (with its power
    0.84), because the clip and Adam's momentum hold a large step back. So the learning rate is multiplied by
    desired_kl / kl, but by at most MAX_LR_CHANGE and at least its inverse, and never exceeds MAX_LR_GROWTH * lr.
    (Schulman et al. 2017, section 4, let a penalty's weight follow KL.)

    Updates of the transition do not count. They learn from the teacher's greedy tokens, and the same learning rate then
    moves the policy several times as far as in RL.
    """
    desired_kl = settings.desired_kl
    if desired_kl is None or kl is None or math.isnan(kl):
        return
    group = optimizer.param_groups[0]
    kl_in_bounds = min(max(kl, desired_kl / MAX_LR_CHANGE), desired_kl * MAX_LR_CHANGE)
    group[RL_LR] = min(group["lr"] * (desired_kl / kl_in_bounds), MAX_LR_GROWTH * settings.lr)
