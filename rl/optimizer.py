"""AdamW, and an optimizer step that clips large gradients and skips broken ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ADAM_EPS = 1e-8  # torch's default
SKIP_FACTOR = 1000.0  # times max_grad_norm: a step with a larger gradient is skipped


def make_optimizer(parameters: Sequence[Tensor], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Make AdamW over `parameters`, with its moments already allocated.

    The fused AdamW is used, because it runs as few kernels and is the only one that can skip a step on the device (see
    `optimizer_step`). By default it would allocate its moments in its first step. At that time recorded CUDA graphs may
    fill the GPU, and an optimizer step cannot wait until some of them are freed.
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
