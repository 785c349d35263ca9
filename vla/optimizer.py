"""AdamW for a policy's trainable parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor


def make_optimizer(parameters: Sequence[Tensor], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Make AdamW over `parameters`, with its moments already allocated.

    The fused AdamW is used, because it runs as few kernels and is the only one that can skip a step on the device
    (`rl.optimizer_step`). By default it would allocate its moments in its first step. At that time recorded CUDA graphs
    may fill the GPU, and an optimizer step cannot wait until some of them are freed.
    """
    optimizer = torch.optim.AdamW(parameters, lr, weight_decay=weight_decay, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    # Layers keep copies of their adapters, which `AdaptedLayers.refresh` writes anew when the versions of the
    # parameters have increased. A fused optimizer does not increase them itself.
    optimizer.register_step_post_hook(lambda *_: torch.autograd.graph.increment_version(parameters))
    return optimizer
