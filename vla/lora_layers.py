"""Linear maps with a low-rank adapter beside the frozen weight, as one matrix product.

    y = W x + b + s B (A x)  =  [W | s B] [x ; A x] + b,        s = alpha / rank

The frozen weight is stored with room for s B behind its last column, so that the adapter costs a product of 16 columns
and a slightly longer one, and no pass over the output. Several linear maps of one input (q, k, v; gate, up) are one
layer with several adapters: A's are stacked, B's stand side by side in blocks.

Adapters are float32; the products run in the frozen weight's dtype. What an adapter adds joins the frozen product
before that is rounded: a sum of two bfloat16 numbers loses the smaller one if it is less than half of the other's last
digit, and what an optimizer step adds is. Source: Hu et al. 2021, arXiv:2106.09685.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla.append_product import with_product_appended
from vla.nf4 import Nf4Linear


class LoraLinear(nn.Module):
    """One or several linear maps of the same input, with an adapter on each, on some or on none of them."""

    def __init__(self, bases: Sequence[nn.Linear], adapted: Sequence[bool], rank: int, alpha: int):
        super().__init__()
        first = bases[0].weight
        self.in_features = bases[0].in_features
        self.out_features = [base.out_features for base in bases]
        self.rank, self.alpha = rank, alpha
        self.adapted = tuple(adapted)
        self.enabled = True
        num_adapted = sum(adapted)
        self.blocks = _blocks(self.out_features, adapted)
        # [W | s B]; the columns of B are filled by `StoredAdapters`.
        weight = first.new_zeros(sum(self.out_features), self.in_features + num_adapted * rank)
        torch.cat([base.weight.detach() for base in bases], out=weight[:, : self.in_features])
        self.weight = nn.Parameter(weight, requires_grad=False)
        biases = [base.bias.detach() for base in bases if base.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        zeros = partial(torch.zeros, dtype=torch.float32, device=first.device)
        rows = sum(end - start for start, end in self.blocks)
        self.lora_A = nn.Parameter(zeros(num_adapted * rank, self.in_features))
        self.lora_B = nn.Parameter(zeros(rows, rank))
        # A as the products want it: to round it in every forward pass is another kernel of every layer.
        self.rounded_A: Tensor | None
        rounded = None if first.dtype == torch.float32 else torch.zeros_like(self.lora_A, dtype=first.dtype)
        self.register_buffer("rounded_A", rounded, persistent=False)  # filled by `StoredAdapters`
        self.first_row: int | None = None  # of the rows of `weight` that this process has, where vla.sharding cut it

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., sum of out_features)"""
        if not self.enabled or not self.blocks:
            return F.linear(x, self.weight[:, : self.in_features], self.bias)
        rounded = self.lora_A if self.rounded_A is None else self.rounded_A
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return F.linear(with_product_appended(x, rounded), self.weight, self.bias)
        return _Augmented.apply(
            x, self.lora_A, self.lora_B, rounded.detach(), self.weight, self.bias, self.blocks, self.scale
        )

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """`self(x)[..., rows]` in float32 without computing the others; of a layer of one map.

        The frozen product is rounded to its dtype, as in the reference; the adapter's share is added in float32.
        """
        bias = None if self.bias is None else self.bias[rows]
        base = F.linear(x, self.weight[rows, : self.in_features], bias).float()
        if not self.enabled or not self.blocks:
            return base
        return base + F.linear(F.linear(x.float(), self.lora_A), self.lora_B[rows]) * self.scale

    def adapters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(A (rank, in_features), B (out_features, rank)) of every adapted map, as views."""
        offset = 0
        for i, (start, end) in enumerate(self.blocks):
            yield self.lora_A[i * self.rank : (i + 1) * self.rank], self.lora_B[offset : offset + end - start]
            offset += end - start

    def stored_ups(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(place in the stored weight, rows of B whose s B belongs there) of every adapted map, as views."""
        # Graphs that hold this weight are past their backward pass when it is written to: see Policy.
        weight, first = self.weight.data, 0
        if self.first_row is not None:  # FSDP has made it a DTensor
            weight, first = self.weight.to_local(), self.first_row  # type: ignore[attr-defined]
        for i, ((start, end), (_, up)) in enumerate(zip(self.blocks, self.adapters(), strict=True)):
            column = self.in_features + i * self.rank
            top, bottom = max(start, first), min(end, first + len(weight))  # the adapter's rows that are here
            if top < bottom:
                place = weight[top - first : bottom - first, column : column + self.rank]
                yield place, up[top - start : bottom - start]


class StoredAdapters:
    """What many layers keep of their adapters, written together: one by one takes 20 ms of Python.

    s B in the stored weights, and A rounded.
    """

    def __init__(self, layers: Sequence[LoraLinear]):
        """Holds views: not to be used after a layer's weight or adapter was moved."""
        with torch.no_grad():
            pairs = [pair for layer in layers for pair in layer.stored_ups()]
        self._places, self._ups = [place for place, _ in pairs], [up for _, up in pairs]
        self._scale = layers[0].scale if layers else 1.0
        rounded = [layer for layer in layers if layer.rounded_A is not None]
        self._rounded = [layer.rounded_A.data for layer in rounded if layer.rounded_A is not None]
        self._downs = [layer.lora_A.data for layer in rounded]

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring them up to date."""
        if self._places:
            scaled = self._ups if self._scale == 1 else torch._foreach_mul(self._ups, self._scale)
            torch._foreach_copy_(self._places, scaled)
        if self._rounded:
            torch._foreach_copy_(self._rounded, self._downs)


class LoraConv2d(nn.Module):
    """A patch embedding with its adapter: A is a convolution of the same patches, B is 1 x 1."""

    def __init__(self, base: nn.Conv2d, rank: int, alpha: int):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.adapted = (True,)
        self.rank, self.alpha = rank, alpha
        self.enabled = True
        zeros = partial(torch.zeros, dtype=torch.float32, device=base.weight.device)
        self.lora_A = nn.Parameter(zeros(rank, *base.weight.shape[1:]))
        self.lora_B = nn.Parameter(zeros(base.out_channels, rank, 1, 1))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, out_channels, patches down, patches across)"""
        base, exact = self.base_layer, images.float()  # a ten thousandth of the network's work
        bias = None if base.bias is None else base.bias.float()
        features = F.conv2d(exact, base.weight.float(), bias, base.stride)
        if self.enabled:
            features = features + F.conv2d(F.conv2d(exact, self.lora_A, stride=base.stride), self.lora_B * self.scale)
        return features.to(images.dtype)

    def adapters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(A, B), as convolutions."""
        yield self.lora_A, self.lora_B


class LoraNf4Linear(nn.Module):
    """A linear map whose frozen weight is in 4 bits, with its adapter beside it: packed, it has no room for s B.

    Several maps of one input stay several layers, each unpacked by itself: that halves the memory of the largest.
    """

    def __init__(self, base: Nf4Linear, rank: int, alpha: int):
        super().__init__()
        self.base_layer = base
        self.adapted = (True,)
        self.rank, self.alpha = rank, alpha
        self.enabled = True
        zeros = partial(torch.zeros, dtype=torch.float32, device=base.packed.device)
        self.lora_A = nn.Parameter(zeros(rank, base.in_features))
        self.lora_B = nn.Parameter(zeros(base.out_features, rank))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        if not self.enabled:
            return self.base_layer(x)
        low = F.linear(x, self.lora_A.to(x.dtype))
        return self.base_layer(x, low, (self.lora_B * self.scale).to(x.dtype))

    def adapters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(A (rank, in_features), B (out_features, rank))"""
        yield self.lora_A, self.lora_B


LoraLayer = LoraLinear | LoraConv2d | LoraNf4Linear


def with_adapter(base: nn.Linear | nn.Conv2d | Nf4Linear, rank: int, alpha: int) -> LoraLayer:
    """The layer that takes the place of one adapted map."""
    if isinstance(base, nn.Conv2d):
        return LoraConv2d(base, rank, alpha)
    return LoraNf4Linear(base, rank, alpha) if isinstance(base, Nf4Linear) else LoraLinear([base], [True], rank, alpha)


class _Augmented(torch.autograd.Function):
    """[W | s B] [x ; A x] + b, with gradients to x, A and B, and none to the frozen W and b."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        rounded: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        blocks: list[tuple[int, int]],
        scale: float,
    ) -> Tensor:
        """down (ranks, in_features) A, up (rows, rank) B; rounded: A in the dtype of x."""
        low = F.linear(x, rounded)
        ctx.save_for_backward(x, low, rounded, weight)
        ctx.blocks, ctx.scale, ctx.rank, ctx.dtype = blocks, scale, up.shape[1], up.dtype
        return F.linear(torch.cat([x, low], dim=-1), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, rounded, weight = ctx.saved_tensors
        inputs = grad @ weight
        split = weight.shape[1] - low.shape[-1]
        flat_grad, flat_low = grad.flatten(0, -2), low.flatten(0, -2)
        ups = [
            flat_grad[:, start:end].T @ flat_low[:, i * ctx.rank : (i + 1) * ctx.rank]
            for i, (start, end) in enumerate(ctx.blocks)
        ]
        up = (torch.cat(ups) * ctx.scale).to(ctx.dtype)
        low_grad = inputs[..., split:]
        down = (low_grad.flatten(0, -2).T @ x.flatten(0, -2)).to(ctx.dtype)
        return inputs[..., :split] + low_grad @ rounded, down, up, None, None, None, None, None


def _blocks(out_features: Sequence[int], adapted: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """(first, one past last) output row of every adapted map."""
    blocks, start = [], 0
    for size, has_adapter in zip(out_features, adapted, strict=True):
        if has_adapter:
            blocks.append((start, start + size))
        start += size
    return tuple(blocks)
