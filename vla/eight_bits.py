"""Frozen linear maps of the language model's blocks with int8 weights, which take half the memory of bfloat16.

Every output row of the weights W, and the input x of every token, is scaled so that its largest absolute value becomes
127. The scales can be taken out of the sum over the inputs, which is exact:

    W x  ~  s_W s_x sum(W8 x8)

The adapter's product is not quantised. It is added to the scaled sum in float32, before rounding (`vla.lora`). The
gradient to x is computed with the same int8 weights, converted to the gradient's dtype.

Source: Dettmers et al. 2022, arXiv:2208.07339 (scales by row and token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from contracts import BadInput

# Begins the names of the modules whose matrices are quantised: nine tenths of the 7B network.
QUANTISED = "language_model.model.layers."


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x (..., K) to int8. Returns the rounded numbers and the scale of every row (..., 1) float32."""
    exact = x.float()
    scale = exact.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127.0
    return (exact / scale).round().to(torch.int8), scale


def product(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Compute W x in float32: x (..., K) -> (..., rows); weight (rows, K) in int8, weight_scale (rows,)."""
    x_8_bits, x_scale = quantise(x.flatten(0, -2))
    sums = torch._int_mm(x_8_bits, weight.T).float()
    return (sums * x_scale * weight_scale).unflatten(0, x.shape[:-1])


def gradient(grad: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The gradient of `product` to x, as if x were not rounded: (..., rows) -> (..., K)."""
    return (grad * weight_scale).to(grad.dtype) @ weight.to(grad.dtype)


def check_device(device: torch.device) -> None:
    """Raise BadInput when the GPU's matrix units cannot multiply int8: those before Ampere. A CPU is not checked."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise BadInput(
            f"--frozen-weights int8 needs a GPU of compute capability 8.0 or more, "
            f"{torch.cuda.get_device_name(device)} has less: use bf16"
        )
