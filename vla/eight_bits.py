"""Frozen linear maps of the language model's blocks with 8-bit weights, which take half the memory of bfloat16.

Every output row of the weights W, and the input x of every token, is scaled so that its largest absolute value becomes
the largest number of the format. The scales can be taken out of the sum over the inputs. The sum is exact for int8, and
computed in float32 for fp8 (e4m3):

    W x  ~  s_W s_x sum(W8 x8)

The adapter's product is not quantised. It is added to the scaled sum in float32, before rounding (`vla.lora`). The
gradient to x is computed with the same 8-bit weights, converted to the gradient's dtype.

The numbers of int8 are evenly spaced; those of fp8 are farther apart the larger they are. So int8 is more accurate for
Gaussian numbers, and fp8 for a row with outliers.

Source: Dettmers et al. 2022, arXiv:2208.07339 (scales by row and token); Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contracts import BadInput

FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST_NUMBER = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# The smallest compute capability of GPUs whose matrix units support the format: Ampere for int8, Ada for fp8.
LEAST_CAPABILITY = {"int8": (8, 0), "fp8": (8, 9)}
# Begins the names of the modules whose matrices are quantised: nine tenths of the 7B network.
QUANTISED = "language_model.model.layers."


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round x (..., K) to an 8-bit dtype. Returns the rounded numbers and the scale of every row (..., 1) float32."""
    exact = x.float()
    scale = exact.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST_NUMBER[dtype]
    scaled = exact / scale
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def product(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Compute W x in float32: x (..., K) -> (..., rows); weight (rows, K) in 8 bits, weight_scale (rows,)."""
    x_8_bits, x_scale = quantise(x.flatten(0, -2), weight.dtype)
    if weight.dtype == torch.int8:
        sums = torch._int_mm(x_8_bits, weight.T).float()
    else:
        one = torch.ones((), device=x.device)
        sums = torch._scaled_mm(x_8_bits, weight.T, one, one, out_dtype=torch.float32)
    return (sums * x_scale * weight_scale).unflatten(0, x.shape[:-1])


def gradient(grad: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The gradient of `product` to x, as if x were not rounded: (..., rows) -> (..., K)."""
    return (grad * weight_scale).to(grad.dtype) @ weight.to(grad.dtype)


def check_device(frozen_weights: str, device: torch.device) -> None:
    """Raise BadInput when the GPU cannot multiply matrices of this format. A CPU is not checked."""
    if device.type != "cuda" or frozen_weights not in FORMATS:
        return
    capability = torch.cuda.get_device_capability(device)
    least = LEAST_CAPABILITY[frozen_weights]
    if capability < least:
        raise BadInput(
            f"--frozen-weights {frozen_weights} needs a GPU of compute capability {least[0]}.{least[1]} or more, "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: use bf16"
        )
