"""Put LoRA adapters on a network, and treat those of all its layers together.

openvla-oft trains with peft 0.11 and "all-linear". In that version it means every nn.Linear and every module that
shares the last part of its name with one: also both patch embeddings (convolutions called `proj`) and `lm_head`, 439
modules in the 7B network. In newer versions of peft it means something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from vla.lora import FrozenLinear, LoraConv2d, LoraLinear, draw_lora_A

# The parts of the network that get adapters. The proprio projector gets none, because all its weights are trained.
ADAPTED_PARTS = ("vision_backbone", "projector", "language_model")
# Linear maps of the same input that become one layer: name of the layer -> names of the maps.
FUSED_MAPS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FUSED_NAMES = {name: fused_name for fused_name, names in FUSED_MAPS.items() for name in names}

LoraLayer = LoraLinear | LoraConv2d


class AdaptedLayers:
    """All adapted layers of a network. Updates the copies of A and B that the products read (A rounded, s B)."""

    def __init__(self, layers: list[tuple[str, LoraLayer]]):
        """layers: names in the network and layers, of the same rank and alpha."""
        self.layers = layers
        self.rank = layers[0][1].rank
        self.alpha = layers[0][1].alpha
        self._scale = layers[0][1].scale
        self._copied_versions: list[int] = []  # of the matrices when the copies were last written
        # Pairs of a matrix and its copy. `refresh` writes the copies before a forward pass. By then the backward passes
        # of earlier autograd graphs, which need the old values, are over; `data` keeps autograd from objecting.
        self._rounded_As: list[tuple[Tensor, Tensor]] = []
        self._scaled_Bs: list[tuple[Tensor, Tensor]] = []
        for _, layer in layers:
            if not isinstance(layer, LoraLinear):
                continue
            if layer.rounded_A is not None:
                self._rounded_As.append((layer.lora_A.detach(), layer.rounded_A.data))
            columns = layer.weight.data[:, layer.in_features :] if layer.scaled_B is None else layer.scaled_B
            blocks = zip(layer.pairs(), columns.split(layer.rank, dim=1), layer.row_ranges, strict=True)
            for (_, lora_B), block, (start, end) in blocks:
                self._scaled_Bs.append((lora_B.detach(), block[start:end]))

    @property
    def enabled(self) -> bool:
        return self.layers[0][1].enabled

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copies if A or B has changed. Called before every forward pass.

        All copies are written at once, because one by one takes 20 ms.
        """
        # A matrix shares its version with the parameter that it is a view of. Optimizer steps increase it
        # (`vla.optimizer`).
        versions = [matrix._version for matrix, _ in (*self._rounded_As, *self._scaled_Bs)]
        if versions == self._copied_versions:
            return
        Bs, scaled_Bs = zip(*self._scaled_Bs, strict=True)
        torch._foreach_copy_(scaled_Bs, Bs if self._scale == 1 else torch._foreach_mul(Bs, self._scale))
        if self._rounded_As:
            As, rounded_As = zip(*self._rounded_As, strict=True)
            torch._foreach_copy_(rounded_As, As)
        self._copied_versions = versions

    def named_matrices(self) -> dict[str, Tensor]:
        """A and B of all maps, as views, by name: "<name of the map in the base network>.lora_A" or ".lora_B"."""
        matrices: dict[str, Tensor] = {}
        for name, layer in self.layers:
            parent, _, child = name.rpartition(".")
            map_names = FUSED_MAPS.get(child, (child,))
            for map_name, (lora_A, lora_B) in zip(map_names, layer.pairs(), strict=True):
                full_name = f"{parent}.{map_name}".lstrip(".")
                matrices[f"{full_name}.lora_A"] = lora_A
                matrices[f"{full_name}.lora_B"] = lora_B
        return matrices

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within this block, run the network without its adapters. Blocks may be nested."""
        layers = [layer for _, layer in self.layers if layer.enabled]
        for layer in layers:
            layer.enabled = False
        try:
            yield
        finally:
            for layer in layers:
                layer.enabled = True


def add_lora(
    network: nn.Module,
    rank: int,
    alpha: int,
    dtype: torch.dtype,
    seed: int = 0,
    frozen_parts: Sequence[str] = (),
) -> AdaptedLayers:
    """Freeze a network, and put adapters on every linear map and both patch embeddings but those of `frozen_parts`.

    seed: of the adapters' first values, see `draw_lora_A`. dtype: of the layers' inputs and outputs.
    """
    network.requires_grad_(False)
    # This list holds no leaf modules, so that a replaced one is freed at once.
    parents = [(name, module) for name, module in network.named_modules() if [*module.children()]]
    frozen_prefixes = tuple(f"{part}." for part in frozen_parts)
    for name, parent in parents:
        if f"{name}.".startswith(frozen_prefixes):
            _replace_children(parent, FrozenLinear, lambda convolution: convolution)
        elif name.split(".")[0] in ADAPTED_PARTS:
            _replace_children(
                parent,
                lambda bases: LoraLinear(bases, rank, alpha, dtype),
                lambda convolution: LoraConv2d(convolution, rank, alpha),
            )
    # The list of layers is kept, because searching all modules takes milliseconds.
    adapters = AdaptedLayers(
        [(name, module) for name, module in network.named_modules() if isinstance(module, LoraLayer)]
    )
    generator = torch.Generator().manual_seed(seed)
    for _, layer in adapters.layers:
        draw_lora_A(layer, generator)
    network.eval()
    return adapters


def _replace_children(
    parent: nn.Module,
    make_linear: Callable[[Sequence[nn.Linear]], nn.Module],
    make_convolution: Callable[[nn.Conv2d], nn.Module],
) -> None:
    """Replace a module's direct linear maps and convolutions by layers of this program, in the same order."""
    children = dict(parent.named_children())
    if not any(isinstance(module, nn.Linear | nn.Conv2d) for module in children.values()):
        return
    for child in children:
        delattr(parent, child)
    for child, module in children.items():
        name = FUSED_NAMES.get(child, child)
        if isinstance(module, nn.Conv2d):
            parent.add_module(name, make_convolution(module))
        elif not isinstance(module, nn.Linear):
            parent.add_module(name, module)
        elif not hasattr(parent, name):  # a single map, or the first of several that become one layer
            bases = [cast("nn.Linear", children[map_name]) for map_name in FUSED_MAPS.get(name, (child,))]
            parent.add_module(name, make_linear(bases))
    if next(parent.parameters()).is_cuda:
        torch.cuda.empty_cache()  # the next layers have other sizes, and cannot use the freed blocks
