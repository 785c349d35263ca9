"""LoRA adapters on every linear map of a network, and the folder that holds a trained policy.

Source: Hu et al. 2021, arXiv:2106.09685. A linear map with its adapter is one matrix product,

    y = W x + b + s B (A x)  =  [W | s B] [x ; A x] + b,        s = alpha / rank

for which the frozen weight has room for s B behind its last column. Several linear maps of one input (q, k, v; gate,
up) are one layer with several adapters: A's are stacked, B's stand in blocks. Adapters are float32; the products run in
the frozen weight's dtype. What an adapter adds joins the frozen product before that is rounded: a sum of two bfloat16
numbers loses the smaller one if it is less than half of the other's last digit, and what an optimizer step adds is.
Beside a frozen weight of 8 bits (`vla.eight_bits`) s B stands apart, and the two products are added in float32.

openvla-oft trains with peft 0.11 and "all-linear", which there meant every nn.Linear plus every module that shares a
linear layer's last name: both patch embeddings (convolutions called `proj`) and `lm_head`, 439 modules in the 7B
network. Newer versions of peft mean something else by it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contracts import BadInput, read_json, write_json
from vla import eight_bits
from vla.weights import read_header, read_tensors, write_tensors

if TYPE_CHECKING:
    from vla.model import OpenVLAOFT

ADAPTED_PARTS = (
    "vision_backbone",
    "projector",
    "language_model",
)  # of the network; the proprio projector has none
# Linear maps of one input: one product
TOGETHER = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PROPRIO_FILE = "proprio_projector.safetensors"
SMALL_FILES = re.compile(
    r"tokenizer\.model|.*(token|processor|statistics).*\.json"
)  # that evaluation reads, too
KEY_PREFIX = "base_model.model."  # peft's name for the module that it wraps


class LoraLinear(nn.Module):
    """One or several linear maps of the same input, with an adapter on each; dtype: of what goes in and out."""

    def __init__(self, bases: Sequence[nn.Linear], rank: int, alpha: int, dtype: torch.dtype):
        super().__init__()
        first = bases[0].weight
        self.in_features = bases[0].in_features
        self.out_features = [base.out_features for base in bases]
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self.enabled = True
        # (first, one past last) output row of every map
        self.blocks = tuple(pairwise(accumulate(self.out_features, initial=0)))
        rows, ranks = sum(self.out_features), len(bases) * rank
        # [W | s B], or apart where W has 8 bits; the columns of B are filled by `Adapters`.
        self.weight_scale: Tensor | None
        self.columns: Tensor | None
        scales: list[Any] = [base.weight_scale for base in bases if hasattr(base, "weight_scale")]
        self.register_buffer("weight_scale", torch.cat(scales) if scales else None, persistent=False)
        columns = torch.zeros(rows, ranks, dtype=dtype, device=first.device) if scales else None
        self.register_buffer("columns", columns, persistent=False)
        weight = first.new_zeros(rows, self.in_features + (0 if scales else ranks))
        torch.cat([base.weight.detach() for base in bases], out=weight[:, : self.in_features])
        self.weight = nn.Parameter(weight, requires_grad=False)
        biases = [base.bias.detach() for base in bases if base.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.lora_A = nn.Parameter(torch.zeros(ranks, self.in_features, device=first.device))
        self.lora_B = nn.Parameter(torch.zeros(rows, rank, device=first.device))
        # A as the products want it, filled by `Adapters`: to round it in every forward pass is a kernel of every layer.
        self.rounded_A: Tensor | None
        rounded = None if dtype == torch.float32 else torch.zeros_like(self.lora_A, dtype=dtype)
        self.register_buffer("rounded_A", rounded, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., sum of out_features)"""
        if not self.enabled:
            if self.weight_scale is not None:
                exact = eight_bits.product(x, self.weight, self.weight_scale)
                return (exact if self.bias is None else exact + self.bias).to(x.dtype)
            return F.linear(x, self.weight[:, : self.in_features], self.bias)
        rounded = self.lora_A if self.rounded_A is None else self.rounded_A
        if self.weight_scale is None and torch.compiler.is_compiling() and not torch.is_grad_enabled():
            # A `torch.cat` of x and A x copies x. For one of x and zeros torch.compile copies nothing that it computes
            # itself, and A x then takes the zeros' place (an assignment to a slice would copy all).
            wide = torch.cat([x, x.new_zeros(*x.shape[:-1], len(rounded))], dim=-1)
            torch.ops.vla_grpo.append_product(wide, rounded)
            return F.linear(wide, self.weight, self.bias)
        return _Augmented.apply(
            x, self.lora_A, self.lora_B, rounded.detach(), self.weight, self.weight_scale, self.columns, self.bias,
            self.blocks, self.scale,
        )  # fmt: skip

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """`self(x)[..., rows]` of a map without bias in float32, the frozen product rounded as in the reference."""
        base = F.linear(x, self.weight[rows, : self.in_features]).float()
        if not self.enabled:
            return base
        return base + F.linear(F.linear(x.float(), self.lora_A), self.lora_B[rows]) * self.scale

    def log_sum_exp(self, x: Tensor, rows: slice) -> Tensor:
        """Of `self(x)[..., rows]`, which is not kept; float32, with gradient to x and A, none to those rows of B."""
        wide = torch.cat([x, F.linear(x, self.lora_A.to(x.dtype))], dim=-1) if self.enabled else x
        return _LogSumExp.apply(wide, self.weight[rows, : wide.shape[-1]])

    def adapters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(A (rank, in_features), B (out_features, rank)) of every map, as views."""
        for i, (start, end) in enumerate(self.blocks):
            yield self.lora_A[i * self.rank : (i + 1) * self.rank], self.lora_B[start:end]


class _Augmented(torch.autograd.Function):
    """[W | s B] [x ; A x] + b, with gradients to x, A and B, and none to the frozen W and b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, up: Tensor, rounded: Tensor, weight: Tensor, weight_scale: Tensor | None,
        columns: Tensor | None, bias: Tensor | None, blocks: tuple[tuple[int, int], ...], scale: float,
    ) -> Tensor:  # fmt: skip
        """down (ranks, in_features) A, up (rows, rank) B; rounded: A in the dtype of x; columns: s B beside 8 bits."""
        low = F.linear(x, rounded)
        ctx.save_for_backward(x, low, rounded, weight, weight_scale, columns)
        ctx.blocks, ctx.scale, ctx.rank, ctx.dtype = blocks, scale, up.shape[1], up.dtype
        if weight_scale is not None and columns is not None:
            return (eight_bits.product(x, weight, weight_scale) + F.linear(low, columns, bias)).to(x.dtype)
        return F.linear(torch.cat([x, low], dim=-1), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, rounded, weight, weight_scale, columns = ctx.saved_tensors
        if weight_scale is None:
            x_grad, low_grad = (grad @ weight).split([x.shape[-1], low.shape[-1]], dim=-1)
        else:
            x_grad, low_grad = eight_bits.gradient(grad, weight, weight_scale), grad @ columns
        flat_grad, flat_low = grad.flatten(0, -2), low.flatten(0, -2)
        ups = [
            flat_grad[:, start:end].T @ flat_low[:, i * ctx.rank : (i + 1) * ctx.rank]
            for i, (start, end) in enumerate(ctx.blocks)
        ]
        up = (torch.cat(ups) * ctx.scale).to(ctx.dtype)
        down = (low_grad.flatten(0, -2).T @ x.flatten(0, -2)).to(ctx.dtype)
        return x_grad + low_grad @ rounded, down, up, None, None, None, None, None, None, None


class _LogSumExp(torch.autograd.Function):
    """log of the sum of exp(W x). The gradient to x, softmax(W x) W, is computed with it: no logits are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(x, weight).float()
        total = logits.logsumexp(-1)
        ctx.save_for_backward(logits.sub_(total[..., None]).exp_().to(weight.dtype) @ weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return (grad[..., None] * slope).to(slope.dtype), None


# By the tag it may get rows that are padded in memory. (`torch.library.custom_op` takes tags from torch 2.7 on.)
torch.library.define(
    "vla_grpo::append_product",
    "(Tensor(a!) wide, Tensor downs) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
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
            features = features + F.conv2d(
                F.conv2d(exact, self.lora_A, stride=base.stride), self.lora_B * self.scale
            )
        return features.to(images.dtype)

    def adapters(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.lora_A, self.lora_B


LoraLayer = LoraLinear | LoraConv2d


class Adapters:
    """A network's adapted layers, and views of what they keep of their adapters: s B in the weights, and A rounded."""

    def __init__(self, layers: list[tuple[str, LoraLayer]]):
        self.layers = layers
        self._matrices: list[Tensor] = [
            matrix for _, layer in layers for matrix in (layer.lora_A, layer.lora_B)
        ]
        self._version = -1  # of the matrices, when the copies were last written
        linears = [layer for _, layer in layers if isinstance(layer, LoraLinear)]
        self._scale = linears[0].scale
        self._rounded = [layer.rounded_A.data for layer in linears if layer.rounded_A is not None]
        self._downs = [layer.lora_A.data for layer in linears if layer.rounded_A is not None]
        self._places, self._ups = [], []
        for layer in linears:
            for i, ((start, end), (_, up)) in enumerate(zip(layer.blocks, layer.adapters(), strict=True)):
                # Graphs that hold these are past their backward pass when they are written to: see Policy.
                columns = (
                    layer.weight.data[:, layer.in_features :] if layer.columns is None else layer.columns
                )
                self._places.append(columns[start:end, i * layer.rank : (i + 1) * layer.rank])
                self._ups.append(up.data)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copies up to date, all together: one by one takes 20 ms. Before every forward pass."""
        version = sum(matrix._version for matrix in self._matrices)  # each one only grows; see Policy.watch
        if version == self._version:
            return
        scaled = self._ups if self._scale == 1 else torch._foreach_mul(self._ups, self._scale)
        torch._foreach_copy_(self._places, scaled)
        if self._rounded:
            torch._foreach_copy_(self._rounded, self._downs)
        self._version = version


def add_lora(network: OpenVLAOFT, rank: int, alpha: int, seed: int = 0) -> None:
    """Freeze the network and put adapters on every linear map and both patch embeddings, whether used or not.

    B is zero, A normal with standard deviation 1 / rank (peft's "gaussian"), drawn on the CPU: the same on any device.
    """
    network.requires_grad_(False)
    # Of leaves nothing is held: what is replaced is freed at once.
    parents = [
        (name, module)
        for name, module in network.named_modules()
        if next(module.children(), None) is not None
    ]
    for name, parent in parents:
        if name.split(".")[0] in ADAPTED_PARTS:
            _adapt_children(parent, rank, alpha, network.dtype)
    # Kept, for to search all modules takes milliseconds.
    layers = [(name, module) for name, module in network.named_modules() if isinstance(module, LoraLayer)]
    network.adapters = Adapters(layers)
    generator = torch.Generator().manual_seed(seed)
    for name, matrix in named_adapters(network).items():
        if name.endswith(".lora_A") and not matrix.is_meta:
            with torch.no_grad():
                matrix.copy_(torch.randn(matrix.shape, generator=generator) / rank)
    network.eval()


def _adapt_children(parent: nn.Module, rank: int, alpha: int, dtype: torch.dtype) -> None:
    """Put adapted layers in the place of a module's own linear maps and convolutions. Their order stays."""
    old: dict[str, Any] = dict(parent.named_children())
    if not any(isinstance(module, nn.Linear | nn.Conv2d) for module in old.values()):
        return
    groups = {child: group for group, members in TOGETHER.items() if members[0] in old for child in members}
    new: dict[str, nn.Module] = {}
    for child, module in old.items():
        delattr(parent, child)
        name = groups.get(child, child)
        if isinstance(module, nn.Conv2d):
            new[name] = LoraConv2d(module, rank, alpha)
        elif not isinstance(module, nn.Linear):
            new[name] = module
        elif name not in new:  # the first of its group
            new[name] = LoraLinear(
                [old[member] for member in TOGETHER.get(name, (child,))], rank, alpha, dtype
            )
    for name, module in new.items():
        parent.add_module(name, module)
    if next(parent.parameters()).is_cuda:
        torch.cuda.empty_cache()  # what was replaced has other sizes than what comes next


def named_adapters(network: OpenVLAOFT) -> dict[str, Tensor]:
    """A and B of all adapted maps, by "<name of the map in the base network>.lora_A" and so on, as views."""
    found: dict[str, Tensor] = {}
    for name, layer in network.adapters.layers:
        parent, _, child = name.rpartition(".")
        for member, (down, up) in zip(TOGETHER.get(child, (child,)), layer.adapters(), strict=True):
            full_name = f"{parent}.{member}".lstrip(".")
            found |= {f"{full_name}.lora_A": down, f"{full_name}.lora_B": up}
    return found


@contextmanager
def adapters_disabled(network: OpenVLAOFT) -> Iterator[None]:
    """The base network without its adapters. May be nested; what was disabled before stays disabled after."""
    layers = [layer for _, layer in network.adapters.layers if layer.enabled]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


@dataclass(frozen=True)
class Adapter:
    """An adapter folder in peft's format, read."""

    folder: Path
    rank: int
    alpha: int
    base_model: str | None  # folder or hub id of the checkpoint that it was trained on
    base_fingerprint: (
        str | None
    )  # `vla.weights.fingerprint` of that checkpoint; None: trained by another program
    frozen_weights: str | None  # that it was trained on: `Policy.frozen_weights`
    tensors: dict[str, Tensor]  # named as by `named_adapters`


def save_adapter_folder(
    folder: Path, network: OpenVLAOFT, base_folder: Path, base_model: str, base_fingerprint: str,
    frozen_weights: str = "float32", looks: Collection[str] = (),
) -> None:  # fmt: skip
    """Write what training has changed, in the format of peft's PeftModel.from_pretrained, and what it takes to run."""
    tensors, layer = named_adapters(network), network.adapters.layers[0][1]
    # What is left out has peft's default. Version 0.11.1, openvla-oft's, refuses a file with keys of newer versions.
    config = {
        "peft_type": "LORA", "r": layer.rank, "lora_alpha": layer.alpha, "init_lora_weights": "gaussian",
        "target_modules": [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")],
        "base_model_name_or_path": base_model, "inference_mode": True,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG_FILE, config)
    keyed = {f"{KEY_PREFIX}{name}.weight": tensor for name, tensor in tensors.items()}
    metadata = {"base_fingerprint": base_fingerprint, "frozen_weights": frozen_weights}
    metadata |= {"looks": " ".join(sorted({*looks}))}
    write_tensors(folder / WEIGHTS_FILE, keyed, metadata)
    if network.proprio_projector is not None:
        write_tensors(folder / PROPRIO_FILE, network.proprio_projector.state_dict())
    for path in base_folder.iterdir():
        if SMALL_FILES.fullmatch(path.name):
            shutil.copyfile(path, folder / path.name)


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter in peft's format. Raises BadInput when it is not a plain LoRA adapter."""
    path, config = folder / WEIGHTS_FILE, read_json(folder / CONFIG_FILE)
    rank, alpha, kind = (config.get(key) for key in ("r", "lora_alpha", "peft_type"))
    variants = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "bias")
    refused = [key for key in variants if config.get(key, "none") not in ("none", None, False, {})]
    if kind != "LORA" or refused or not rank or not alpha:
        raise BadInput(
            f"{folder / CONFIG_FILE}: expected a plain LoRA adapter, found peft_type {kind}, r {rank}, lora_alpha "
            f"{alpha} {' '.join(refused)}: merge it with the program that made it"
        )
    tensors = {
        key.removeprefix(KEY_PREFIX).removesuffix(".weight"): x for key, x in read_tensors(path).items()
    }
    for name in tensors:
        module, _, matrix = name.rpartition(".")
        down, up = tensors.get(f"{module}.lora_A"), tensors.get(f"{module}.lora_B")
        if (
            matrix not in ("lora_A", "lora_B")
            or down is None
            or up is None
            or not len(down) == up.shape[1] == rank
        ):
            raise BadInput(
                f"{path}: {name} is not of a pair lora_A and lora_B of rank {rank}, as {CONFIG_FILE} says"
            )
    base = config.get("base_model_name_or_path")
    found = read_header(path)[1]
    return Adapter(
        folder, rank, alpha, base, found.get("base_fingerprint"), found.get("frozen_weights"), tensors
    )


def read_looks(folder: Path) -> list[str]:
    """The pictures that an adapter, and its base as far as that is known, was trained on: see CheckpointInfo."""
    return read_header(folder / WEIGHTS_FILE)[1].get("looks", "").split()


def fill_lora(network: OpenVLAOFT, adapter: Adapter) -> None:
    """Copy a folder's adapters, and projector if it has one, into the network. Raises BadInput when they do not fit."""
    layer = network.adapters.layers[0][1]
    if layer.scale != adapter.alpha / adapter.rank:
        raise BadInput(
            f"{adapter.folder / CONFIG_FILE}: alpha {adapter.alpha} at rank {adapter.rank}, this policy has "
            f"{layer.alpha} at rank {layer.rank}: give the same LoRA flags"
        )
    _copy_into(named_adapters(network), adapter.tensors, adapter.folder / WEIGHTS_FILE)
    network.adapters.refresh()
    path = adapter.folder / PROPRIO_FILE
    if not path.exists():
        return
    if network.proprio_projector is None:
        raise BadInput(
            f"{path}: this adapter was trained with proprio, the checkpoint has none: give its own base"
        )
    _copy_into(network.proprio_projector.state_dict(), read_tensors(path), path)


@torch.no_grad()
def _copy_into(targets: Mapping[str, Tensor], stored: Mapping[str, Tensor], path: Path) -> None:
    for name in sorted(targets.keys() | stored.keys()):
        expected, found = (tuple(some[name].shape) if name in some else "none" for some in (targets, stored))
        if expected != found:
            raise BadInput(
                f"{path}: {name}: expected shape {expected}, found {found}: it belongs to another base"
            )
        targets[name].copy_(stored[name])
