"""Frozen linear maps of the language model's blocks with 8 bits a number: half the memory of bfloat16.

Every output row of the weights W, and every token's x, is scaled so that its largest number is the largest of the
format; the scales leave the sum over the inputs, which is exact (int8) or float32 (fp8, e4m3):

    W x  ~  s_W s_x sum(W8 x8)

The adapter's product is not quantised: it joins the scaled sum in float32, before the one rounding (`vla.lora`). The
gradient to x goes through the same 8-bit weights, widened for the product. int8 spaces its numbers evenly, fp8 in
proportion to their size: of Gaussian numbers int8 loses less, of a row with outliers fp8 does.

Source: Dettmers et al. 2022, arXiv:2208.07339 (scales by row and token); Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contracts import BadInput

FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LEAST_CAPABILITY = {"int8": (8, 0), "fp8": (8, 9)}  # of the GPU's matrix units: Ampere; Ada and Hopper
QUANTISED = "language_model.model.layers."  # all matrices of these modules: nine tenths of the 7B network


def quantise(x: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """(..., K) -> the same in 8 bits, and the scale of every row (..., 1) float32."""
    exact = x.float()
    scale = exact.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST[form]
    scaled = exact / scale
    return (scaled.round() if form == torch.int8 else scaled).to(form), scale


def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """W x in float32, (..., K) -> (..., rows); weight (rows, K) in 8 bits, scale (rows,)."""
    small, size = quantise(x.flatten(0, -2), weight.dtype)
    if weight.dtype == torch.int8:
        total = torch._int_mm(small, weight.T).float()
    else:
        one = torch.ones((), device=x.device)
        total = torch._scaled_mm(small, weight.T, one, one, out_dtype=torch.float32)
    return (total * size * scale).unflatten(0, x.shape[:-1])


def gradient(grad: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The gradient to x of `product`, but for x's own rounding: (..., rows) -> (..., K)."""
    return (grad * scale).to(grad.dtype) @ weight.to(grad.dtype)


def check_device(frozen_weights: str, device: torch.device) -> None:
    """Raises BadInput when the device has no products of this format."""
    if device.type != "cuda" or frozen_weights not in FORMATS:
        return
    found, least = torch.cuda.get_device_capability(device), LEAST_CAPABILITY[frozen_weights]
    if found < least:
        name, needs = (
            torch.cuda.get_device_name(device),
            "a GPU of compute capability {}.{} or more".format(*least),
        )
        raise BadInput(
            f"--frozen-weights {frozen_weights} needs {needs}, {name} has {found[0]}.{found[1]}: use bf16"
        )
