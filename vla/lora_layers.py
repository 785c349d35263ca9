"""Linear maps with a low-rank adapter beside the frozen weight, as one matrix product.

    y = W x + b + s B (A x)  =  [W | s B] [x ; A x] + b,        s = alpha / rank

The frozen weight has room for s B behind its last column, so that an adapter costs no pass over the output. Several
linear maps of one input (q, k, v; gate, up) are one layer with several adapters: A's are stacked, B's stand in blocks.

Adapters are float32; the products run in the frozen weight's dtype. What an adapter adds joins the frozen product
before that is rounded: a sum of two bfloat16 numbers loses the smaller one if it is less than half of the other's last
digit, and what an optimizer step adds is. Source: Hu et al. 2021, arXiv:2106.09685.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoraLinear(nn.Module):
    """One or several linear maps of the same input, with an adapter on each."""

    def __init__(self, bases: Sequence[nn.Linear], rank: int, alpha: int):
        super().__init__()
        first = bases[0].weight
        self.in_features = bases[0].in_features
        self.out_features = [base.out_features for base in bases]
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.enabled = True
        # (first, one past last) output row of every map
        self.blocks = tuple(pairwise(accumulate(self.out_features, initial=0)))
        rows, ranks = sum(self.out_features), len(bases) * rank
        # [W | s B]; the columns of B are filled by `Adapters`.
        weight = first.new_zeros(rows, self.in_features + ranks)
        torch.cat([base.weight.detach() for base in bases], out=weight[:, : self.in_features])
        self.weight = nn.Parameter(weight, requires_grad=False)
        biases = [base.bias.detach() for base in bases if base.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.lora_A = nn.Parameter(torch.zeros(ranks, self.in_features, device=first.device))
        self.lora_B = nn.Parameter(torch.zeros(rows, rank, device=first.device))
        # A as the products want it, filled by `Adapters`: to round it in every forward pass is a kernel of every layer.
        self.rounded_A: Tensor | None
        rounded = None if first.dtype == torch.float32 else torch.zeros_like(self.lora_A, dtype=first.dtype)
        self.register_buffer("rounded_A", rounded, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., sum of out_features)"""
        if not self.enabled:
            return F.linear(x, self.weight[:, : self.in_features], self.bias)
        rounded = self.lora_A if self.rounded_A is None else self.rounded_A
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            # A `torch.cat` of x and A x copies x. For one of x and zeros torch.compile copies nothing that it computes
            # itself, and A x then takes the zeros' place (an assignment to a slice would copy all).
            wide = torch.cat([x, x.new_zeros(*x.shape[:-1], len(rounded))], dim=-1)
            torch.ops.vla_grpo.append_product(wide, rounded)
            return F.linear(wide, self.weight, self.bias)
        return _Augmented.apply(
            x, self.lora_A, self.lora_B, rounded.detach(), self.weight, self.bias, self.blocks, self.scale
        )

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """`self(x)[..., rows]` of a map without bias in float32, the frozen product rounded as in the reference."""
        base = F.linear(x, self.weight[rows, : self.in_features]).float()
        if not self.enabled:
            return base
        return base + F.linear(F.linear(x.float(), self.lora_A), self.lora_B[rows]) * self.scale

    def adapters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(A (rank, in_features), B (out_features, rank)) of every map, as views."""
        for i, (start, end) in enumerate(self.blocks):
            yield self.lora_A[i * self.rank : (i + 1) * self.rank], self.lora_B[start:end]


class _Augmented(torch.autograd.Function):
    """[W | s B] [x ; A x] + b, with gradients to x, A and B, and none to the frozen W and b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, rounded: Tensor, weight: Tensor, bias: Tensor | None,
        blocks: tuple[tuple[int, int], ...], scale: float,
    ) -> Tensor:  # fmt: skip
        """down (ranks, in_features) A, up (rows, rank) B; rounded: A in the dtype of x."""
        low = F.linear(x, rounded)
        ctx.save_for_backward(x, low, rounded, weight)
        ctx.blocks, ctx.scale, ctx.rank, ctx.dtype = blocks, scale, up.shape[1], up.dtype
        return F.linear(torch.cat([x, low], dim=-1), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, rounded, weight = ctx.saved_tensors
        inputs, split = grad @ weight, weight.shape[1] - low.shape[-1]
        flat_grad, flat_low = grad.flatten(0, -2), low.flatten(0, -2)
        ups = [
            flat_grad[:, start:end].T @ flat_low[:, i * ctx.rank : (i + 1) * ctx.rank]
            for i, (start, end) in enumerate(ctx.blocks)
        ]
        up = (torch.cat(ups) * ctx.scale).to(ctx.dtype)
        low_grad = inputs[..., split:]
        down = (low_grad.flatten(0, -2).T @ x.flatten(0, -2)).to(ctx.dtype)
        return inputs[..., :split] + low_grad @ rounded, down, up, None, None, None, None, None


# By the tag it may get rows that are padded in memory. (`torch.library.custom_op` takes tags from torch 2.7 on.)
torch.library.define(
    "vla_grpo::append_product", "(Tensor(a!) wide, Tensor downs) -> ()", tags=(torch.Tag.needs_fixed_stride_order,)
)


@torch.library.impl("vla_grpo::append_product", "CompositeExplicitAutograd")
def append_product(wide: Tensor, downs: Tensor) -> None:
    """The last R columns of `wide` (..., K + R) become the product of its first K and `downs` (R, K), transposed."""
    rows, split = wide.view(-1, wide.shape[-1]), downs.shape[1]
    torch.mm(rows[:, :split], downs.T, out=rows[:, split:])


@torch.library.register_fake("vla_grpo::append_product")
def _without_result(wide: Tensor, downs: Tensor) -> None:
    pass


class LoraConv2d(nn.Module):
    """A patch embedding with its adapter: A is a convolution of the same patches, B is 1 x 1."""

    def __init__(self, base: nn.Conv2d, rank: int, alpha: int):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.enabled = True
        self.lora_A = nn.Parameter(torch.zeros(rank, *base.weight.shape[1:], device=base.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_channels, rank, 1, 1, device=base.weight.device))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, out_channels, patches down, patches across)"""
        base, exact = self.base_layer, images.float()  # a ten thousandth of the network's work
        bias = None if base.bias is None else base.bias.float()
        features = F.conv2d(exact, base.weight.float(), bias, base.stride)
        if self.enabled:
            features = features + F.conv2d(F.conv2d(exact, self.lora_A, stride=base.stride), self.lora_B * self.scale)
        return features.to(images.dtype)

    def adapters(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.lora_A, self.lora_B


LoraLayer = LoraLinear | LoraConv2d
