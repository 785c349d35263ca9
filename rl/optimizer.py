"""AdamW, and its step with protection against broken gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ADAM_EPS = 1e-8  # torch's default
SKIP_FACTOR = 1000.0  # times max_grad_norm: a step with a larger gradient is skipped


def make_optimizer(parameters: Sequence[Tensor], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over `parameters`, with its moments already allocated.

    It is the fused one: a single kernel for all parameters, and the only AdamW that can skip a step on the device (see
    `optimizer_step`). Its moments are allocated now. AdamW would do it in its first step, when recorded CUDA graphs may
    fill the GPU: memory of graphs can be freed for other graphs, but an optimizer cannot wait for it.
    """
    optimizer = torch.optim.AdamW(parameters, lr, eps=ADAM_EPS, weight_decay=weight_decay, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def optimizer_step(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """Take a step with the gradient's L2 norm scaled down to at most `max_norm`. Returns the norm before that, ().

    A step whose norm is not finite or beyond SKIP_FACTOR * max_norm is skipped, and NaN is returned. The device decides
    this by itself, so that nobody waits for it: fused AdamW skips a step marked by `found_inf`, which is how
    torch.amp.GradScaler skips one.
    """
    parameters = optimizer.param_groups[0]["params"]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).to(parameters[0].device)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    is_usable = norm <= SKIP_FACTOR * max_norm  # False for NaN, too
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = (~is_usable).float()  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    return torch.where(is_usable, norm, torch.nan)
