"""Frozen linear maps whose weights are stored in 4 bits (NF4), for GPUs that do not hold them in bfloat16.

A weight becomes one of 16 levels, quantiles of the normal distribution, times the largest absolute value of its block
of 64 consecutive weights. These maxima, less their mean, are stored in 8 bits, in blocks of 256 with a float32 scale
each: 4.13 bits per weight in all. Source: Dettmers et al. 2023, QLoRA, arXiv:2305.14314; packed and unpacked by their
library bitsandbytes, which is imported where 4-bit weights are made, and only there.

Computing stays in the dtype of the input: a product unpacks its whole weight and drops it again, and so does its
gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from errors import BadInput

BLOCK = 64  # weights that share a maximum
MAXIMA_BLOCK = 256  # maxima that share a scale
NO_SHARDS = (
    "a base in 4 bits cannot be spread over processes: leave out --load-in-4bit, or give every process the whole base "
    "(configs/accelerate/one_machine.yaml)"
)


class Nf4Linear(nn.Module):
    """x -> x W^T with a frozen W (out_features, in_features) in 4 bits."""

    packed: Tensor  # see `_quantise`
    maxima: Tensor
    scales: Tensor
    levels: Tensor
    mean: Tensor

    def __init__(self, weight: Tensor):
        """weight: rounded on the device that it is on, in the same way whatever its dtype is."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Not among the tensors of a state dict: a checkpoint holds the weight itself.
        for name, tensor in zip(("packed", "maxima", "scales", "levels", "mean"), _quantise(weight), strict=True):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor, low: Tensor | None = None, up: Tensor | None = None) -> Tensor:
        """x W^T, or x W^T + low up^T rounded once: (..., in_features) -> (..., out_features).

        low (..., rank), up (out_features, rank): of an adapter.
        """
        return nf4_product(x, low, up, *self._stored(), self.out_features, self.in_features, False)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """W, rounded to the levels: (out_features, in_features)."""
        return _dequantise(self._stored(), (self.out_features, self.in_features), dtype)

    def _stored(self) -> tuple[Tensor, ...]:
        return self.packed, self.maxima, self.scales, self.levels, self.mean


def check_bitsandbytes() -> None:
    """Raise BadInput when the library is missing or cannot be loaded."""
    try:
        import bitsandbytes.functional  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise BadInput(
            f"4-bit weights need the package bitsandbytes, which cannot be imported ({_first_line(error)}): "
            "pip install -r requirements-optional.txt"
        ) from None


def block_linears(network: nn.Module) -> list[str]:
    """Names of the linear maps that 4 bits are for: those of the language model's transformer blocks.

    They hold 6.5 of the 7.5 billion weights. The vision transformers and the projector are small, and what they lose
    reaches every later block; embeddings are looked up, not multiplied; of `lm_head` 256 rows are read, in float32.
    Llama's maps have no bias; one that has is left as it is.
    """
    return [
        name
        for name, module in network.named_modules()
        if name.startswith("language_model.model.layers.") and isinstance(module, nn.Linear) and module.bias is None
    ]


def num_in_4bit(module: nn.Module) -> int:
    """Weights that are stored in 4 bits. They are no parameters of the module."""
    return sum(m.out_features * m.in_features for m in module.modules() if isinstance(m, Nf4Linear))


def _quantise(weight: Tensor) -> tuple[Tensor, ...]:
    """(packed, maxima, scales, levels, mean) of a matrix. Raises BadInput where the library cannot use the device.

    packed uint8 (ceil(N / 2), 1), two weights each; maxima uint8 (M = ceil(N / 64),), which stand for levels (256,)
    times scales (ceil(M / 256),), plus mean ().
    """
    from bitsandbytes.functional import quantize_4bit

    try:
        # In float32, because on a CPU the maxima of bfloat16 weights would be rounded once more.
        packed, state = quantize_4bit(weight.float(), blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise BadInput(
            f"bitsandbytes cannot make 4-bit weights on {weight.device} ({_first_line(error)}): "
            "`python -m bitsandbytes` tells more; or leave out --load-in-4bit"
        ) from error
    return packed, state.absmax, state.state2.absmax, state.state2.code, state.offset


def _dequantise(stored: tuple[Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The inverse of `_quantise`. Nothing here waits for a GPU, so that it may be part of a CUDA graph."""
    packed, maxima, scales, levels, mean = stored
    library = torch.ops.bitsandbytes
    largest = library.dequantize_blockwise(maxima, scales, levels, MAXIMA_BLOCK, torch.float32) + mean
    # As one row: of several, the library's code for CPUs begins each with a new block, which is not how it packs them.
    return library.dequantize_4bit(packed, largest, BLOCK, "nf4", [shape[0] * shape[1]], dtype).view(shape)


# One operation for torch.compile, too. In parts, the unpacked weight would be an intermediate result like any other,
# and kept for the backward pass: 13 GB.
@torch.library.custom_op("vla::nf4_product", mutates_args=())
def nf4_product(
    x: Tensor,
    low: Tensor | None,
    up: Tensor | None,
    packed: Tensor,
    maxima: Tensor,
    scales: Tensor,
    levels: Tensor,
    mean: Tensor,
    out_features: int,
    in_features: int,
    transposed: bool,
) -> Tensor:
    """x W^T + low up^T of x (..., in_features), or transposed x W of x (..., out_features)."""
    weight = _dequantise((packed, maxima, scales, levels, mean), (out_features, in_features), x.dtype)
    if transposed:
        return x @ weight
    if low is None or up is None:
        return x @ weight.T
    # One product, as in vla.lora_layers. torch.addmm is none: cuBLAS rounds x W^T before it adds.
    return torch.cat([x, low], dim=-1) @ torch.cat([weight, up], dim=1).T


@nf4_product.register_fake
def _shape(x: Tensor, *stored: Any) -> Tensor:
    out_features, in_features, transposed = stored[-3:]
    return x.new_empty((*x.shape[:-1], in_features if transposed else out_features))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, low, up, *stored, ctx.out_features, ctx.in_features, ctx.transposed = inputs
    ctx.save_for_backward(low, up, *stored)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """To x, the product with W the other way round, and to the adapter's factors."""
    low, up, *stored = ctx.saved_tensors
    to_x = nf4_product(grad, None, None, *stored, ctx.out_features, ctx.in_features, not ctx.transposed)
    if low is None:
        return to_x, *(None,) * 10
    return to_x, grad @ up, grad.flatten(0, -2).T @ low.flatten(0, -2), *(None,) * 8


nf4_product.register_autograd(_gradient, setup_context=_keep)


@register_flop_formula(torch.ops.vla.nf4_product)  # torch.compile weighs by it what to recompute
def _flops(x_shape: tuple[int, ...], low: Any, up: Any, *stored: Any, **_: Any) -> int:
    rows = 1
    for size in x_shape[:-1]:
        rows *= size
    return 2 * rows * stored[5] * stored[6]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
