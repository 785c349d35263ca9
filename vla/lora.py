"""Linear maps and patch embeddings with LoRA adapters.

Source: Hu et al. 2021, arXiv:2106.09685. A linear map and its adapter are one matrix product,

    y = W x + b + s B (A x)  =  [W | s B] [x ; A x] + b,        s = alpha / rank

One tensor holds the frozen weight W and, in additional columns after it, s B. Several linear maps of the same input (q,
k and v; gate and up) form one layer with several adapters: their A are stacked, and their B are blocks of s B.

Why one product: the adapter's part must be added to the frozen part before rounding. A sum of two bfloat16 numbers
loses the smaller one when it is less than half of the larger one's last digit, and the change by one optimizer step is
that small. If the frozen weight is int8 (`vla.eight_bits`), s B is a separate tensor, and the two products are added
in float32.

A and B are float32, and an optimizer changes them. The products read copies in their own dtype: `rounded_A`, and s B in
the last columns of `weight` or in `scaled_B`. `vla.adapters.AdaptedLayers` writes these copies before a forward pass if
A or B has changed, which it knows from torch's version counters (`vla.optimizer` increases them). `LoraLinear.rows`,
for the token head, and `LoraConv2d` read A and B themselves, and add the two products in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla import eight_bits


class FrozenLinear(nn.Module):
    """One or several linear maps of the same input, without adapters; their weights may be int8."""

    def __init__(self, bases: Sequence[nn.Linear]):
        super().__init__()
        self.out_features = [base.out_features for base in bases]
        self.weight_scale: Tensor | None
        self.register_buffer("weight_scale", _joined_scales(bases), persistent=False)
        self.weight = nn.Parameter(_joined_weights(bases, 0), requires_grad=False)
        self.bias = _joined_biases(bases)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all maps, one after the other: x (..., in_features) -> (..., sum of out_features)."""
        return _frozen_product(x, self.weight, self.weight_scale, self.bias)


def _joined_weights(bases: Sequence[nn.Linear], further_columns: int) -> Tensor:
    """The weights of all maps, one below the other, and columns of zeros after them."""
    num_rows = sum(base.out_features for base in bases)
    in_features = bases[0].in_features
    weight = bases[0].weight.new_zeros(num_rows, in_features + further_columns)
    torch.cat([base.weight.detach() for base in bases], out=weight[:, :in_features])
    return weight


def _joined_scales(bases: Sequence[nn.Linear]) -> Tensor | None:
    """The scales of the rows of all maps if their weights are int8."""
    scales = [cast("Tensor", base.weight_scale) for base in bases if hasattr(base, "weight_scale")]
    return torch.cat(scales) if scales else None


def _joined_biases(bases: Sequence[nn.Linear]) -> nn.Parameter | None:
    """The biases of all maps; either all have one or none has."""
    biases = [base.bias.detach() for base in bases if base.bias is not None]
    assert len(biases) in (0, len(bases))
    return nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None


def _frozen_product(x: Tensor, weight: Tensor, weight_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """W x + b in the dtype of x; weight_scale: of its rows if W is int8."""
    if weight_scale is None:
        return F.linear(x, weight, bias)
    product = eight_bits.product(x, weight, weight_scale)
    return (product if bias is None else product + bias).to(x.dtype)


class LoraLinear(nn.Module):
    """One or several linear maps of the same input, with an adapter on each."""

    def __init__(self, bases: Sequence[nn.Linear], rank: int, alpha: int, dtype: torch.dtype):
        """dtype: of the input and the output; the frozen weights of `bases` may be int8 instead."""
        super().__init__()
        device = bases[0].weight.device
        self.in_features = bases[0].in_features
        self.out_features = [base.out_features for base in bases]
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank
        self.enabled = True
        # (first row, one past the last row) of every map in the output
        self.row_ranges = tuple(pairwise(accumulate(self.out_features, initial=0)))
        num_rows = sum(self.out_features)
        total_rank = len(bases) * rank
        self.weight_scale: Tensor | None
        self.scaled_B: Tensor | None
        scales = _joined_scales(bases)
        self.register_buffer("weight_scale", scales, persistent=False)
        scaled_B = None if scales is None else torch.zeros(num_rows, total_rank, dtype=dtype, device=device)
        self.register_buffer("scaled_B", scaled_B, persistent=False)
        weight = _joined_weights(bases, total_rank if scales is None else 0)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = _joined_biases(bases)
        # `draw_lora_A` gives A its values.
        self.lora_A = nn.Parameter(torch.empty(total_rank, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(num_rows, rank, device=device))
        # Rounding A in every forward pass would take one more kernel in every layer.
        self.rounded_A: Tensor | None
        rounded_A = None if dtype == torch.float32 else torch.zeros_like(self.lora_A, dtype=dtype)
        self.register_buffer("rounded_A", rounded_A, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs of all maps, one after the other: x (..., in_features) -> (..., sum of out_features)."""
        if not self.enabled:
            return _frozen_product(x, self.weight[:, : self.in_features], self.weight_scale, self.bias)
        rounded_A = self.lora_A if self.rounded_A is None else self.rounded_A
        is_compiled_inference = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        if is_compiled_inference and self.weight_scale is None:
            return self._product_without_copy(x, rounded_A)
        return _LoraProduct.apply(
            x,
            self.lora_A,
            self.lora_B,
            rounded_A.detach(),
            self.weight,
            self.weight_scale,
            self.scaled_B,
            self.bias,
            self.row_ranges,
            self.scale,
        )

    def _product_without_copy(self, x: Tensor, rounded_A: Tensor) -> Tensor:
        """The same as `_LoraProduct` for compiled code without gradient, where x need not be copied.

        The product reads [x ; A x] as one tensor. A x needs x in memory, so `torch.cat` of the two would copy x. But
        the kernel that computes x can write it into a tensor with room for A x, which is what the compiler makes of
        `torch.cat` of x and zeros. Then A x replaces the zeros. (An assignment to a slice would copy everything.) This
        shortened a decision of a 7B in a batch of 8 from 15.5 to 15.2 ms on an H200.
        """
        extended = torch.cat([x, x.new_zeros(*x.shape[:-1], len(rounded_A))], dim=-1)
        torch.ops.vla_grpo.append_product(extended, rounded_A)
        return F.linear(extended, self.weight, self.bias)

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """`self(x)[..., rows]` in float32. The frozen product is rounded as in openvla-oft."""
        assert self.weight_scale is None
        assert self.bias is None
        frozen_product = F.linear(x, self.weight[rows, : self.in_features]).float()
        if not self.enabled:
            return frozen_product
        return frozen_product + F.linear(F.linear(x.float(), self.lora_A), self.lora_B[rows]) * self.scale

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The matrices A (rank, in_features) and B (out_features, rank) of every map, as views."""
        for i, (start, end) in enumerate(self.row_ranges):
            yield self.lora_A[i * self.rank : (i + 1) * self.rank], self.lora_B[start:end]


class _LoraProduct(torch.autograd.Function):
    """Compute [W | s B] [x ; A x] + b, with gradients to x, A and B, and none to the frozen W and b."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        rounded_A: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None,
        scaled_B: Tensor | None,
        bias: Tensor | None,
        row_ranges: tuple[tuple[int, int], ...],
        scale: float,
    ) -> Tensor:
        """lora_A (total_rank, in), lora_B (rows, rank); rounded_A: A in x's dtype; scaled_B: s B if W is int8."""
        compressed = F.linear(x, rounded_A)
        ctx.save_for_backward(x, compressed, rounded_A, weight, weight_scale, scaled_B)
        ctx.row_ranges = row_ranges
        ctx.scale = scale
        ctx.rank = lora_B.shape[1]
        ctx.dtype = lora_B.dtype
        if weight_scale is not None and scaled_B is not None:
            return (eight_bits.product(x, weight, weight_scale) + F.linear(compressed, scaled_B, bias)).to(
                x.dtype
            )
        return F.linear(torch.cat([x, compressed], dim=-1), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad (..., rows), of the output. One gradient or None for each argument of `forward`."""
        x, compressed, rounded_A, weight, weight_scale, scaled_B = ctx.saved_tensors
        if weight_scale is None:
            x_grad, compressed_grad = (grad @ weight).split([x.shape[-1], compressed.shape[-1]], dim=-1)
        else:
            x_grad = eight_bits.gradient(grad, weight, weight_scale)
            compressed_grad = grad @ scaled_B
        flat_grad = grad.flatten(0, -2)
        flat_compressed = compressed.flatten(0, -2)
        B_grads = [
            flat_grad[:, start:end].T @ flat_compressed[:, i * ctx.rank : (i + 1) * ctx.rank]
            for i, (start, end) in enumerate(ctx.row_ranges)
        ]
        B_grad = (torch.cat(B_grads) * ctx.scale).to(ctx.dtype)
        A_grad = (compressed_grad.flatten(0, -2).T @ x.flatten(0, -2)).to(ctx.dtype)
        return x_grad + compressed_grad @ rounded_A, A_grad, B_grad, None, None, None, None, None, None, None


# The compiler may leave gaps between the rows of a tensor. The tag lets it pass such a tensor as it is, not as a copy
# without gaps. (`torch.library.custom_op` takes tags from torch 2.7 on.)
torch.library.define(
    "vla_grpo::append_product",
    "(Tensor(a!) extended, Tensor lora_A) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


@torch.library.impl("vla_grpo::append_product", "CompositeExplicitAutograd")
def append_product(extended: Tensor, lora_A: Tensor) -> None:
    """Write A x into the last R columns of `extended` (..., K + R), where x is its first K columns and A is (R, K)."""
    rows = extended.view(-1, extended.shape[-1])
    in_features = lora_A.shape[1]
    torch.mm(rows[:, :in_features], lora_A.T, out=rows[:, in_features:])


@torch.library.register_fake("vla_grpo::append_product")
def _append_nothing(extended: Tensor, lora_A: Tensor) -> None:
    """What torch.compile traces instead of the operation, which returns nothing."""


class LoraConv2d(nn.Module):
    """A patch embedding with its adapter: A is a convolution over the same patches, B a 1 x 1 convolution."""

    def __init__(self, base: nn.Conv2d, rank: int, alpha: int):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank
        self.enabled = True
        # `draw_lora_A` gives A its values.
        self.lora_A = nn.Parameter(torch.empty(rank, *base.weight.shape[1:], device=base.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_channels, rank, 1, 1, device=base.weight.device))

    def forward(self, images: Tensor) -> Tensor:
        """images (B, C, H, W) -> (B, out_channels, patches down, patches across)."""
        base = self.base_layer
        # float32 costs little here: this layer is a ten thousandth of the network's work.
        images_float32 = images.float()
        bias = None if base.bias is None else base.bias.float()
        features = F.conv2d(images_float32, base.weight.float(), bias, base.stride)
        if self.enabled:
            compressed = F.conv2d(images_float32, self.lora_A, stride=base.stride)
            features = features + F.conv2d(compressed, self.lora_B * self.scale)
        return features.to(images.dtype)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The kernels A (rank, C, h, w) and B (out_channels, rank, 1, 1)."""
        yield self.lora_A, self.lora_B


@torch.no_grad()
def draw_lora_A(layer: LoraLinear | LoraConv2d, generator: torch.Generator) -> None:
    """Give A its first values: normal numbers of standard deviation 1 / rank (peft's "gaussian"). B is zero.

    They are drawn on the CPU, map by map, so that they are the same on every device.
    """
    for lora_A, _ in layer.pairs():
        lora_A.copy_(torch.randn(lora_A.shape, generator=generator) / layer.rank)
