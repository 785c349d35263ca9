"""LoRA adapters on every linear map of the network, with an explicit list of targets, in peft's file format.

openvla-oft trains with peft 0.11 and "all-linear", which there meant every nn.Linear plus every module that shares a
linear layer's last name: both patch embeddings (convolutions called `proj`) and `lm_head`. Newer versions of peft mean
something else by it, so the targets are listed: 439 modules and 878 tensors in the 7B network.

Adapters are float32 over a base of any dtype, and saved in peft's own format.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from errors import BadInput
from untrusted.json_file import brief, read_json, required
from vla.lora_layers import LoraLayer, LoraLinear, StoredAdapters, with_adapter
from vla.nf4 import Nf4Linear, num_in_4bit
from vla.weights import read_metadata, read_tensors, write_tensors

ADAPTED_PARTS = ("vision_backbone", "projector", "language_model")  # of the network; the proprio projector has none
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MATRICES = ("lora_A", "lora_B")
BASE_WEIGHTS, NF4 = "base_weights", "nf4"  # in the metadata of the weights file: how the base was stored
LARGEST_RANK = 65_536  # no layer is wider
KEY_PREFIX = "base_model.model."  # peft's name for the module that it wraps
# Linear maps of one input that become one product.
TOGETHER = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Adapter:
    """An adapter folder, read."""

    folder: Path
    rank: int
    alpha: int
    base_model: str | None  # folder or hub id of the checkpoint that it was trained on
    base_fingerprint: str | None  # `vla.weights.fingerprint` of that checkpoint; None: trained by another program
    base_in_4bit: bool  # whether that checkpoint's blocks were rounded to NF4 (vla.nf4) when it was trained
    tensors: dict[str, Tensor]  # "<module>.lora_A", "<module>.lora_B", as stored

    @property
    def targets(self) -> list[str]:
        return [name.removesuffix(".lora_A") for name in self.tensors if name.endswith(".lora_A")]


@dataclass
class Adapters:
    """A network's adapted layers. Every forward pass asks for them; to search all modules would take milliseconds."""

    layers: list[tuple[str, LoraLayer]]
    matrices: list[Tensor]  # their A's and B's
    refreshed: int = -1  # sum of the matrices' versions when their stored copies were last brought up to date
    stored: StoredAdapters | None = None


def lora_targets(network: nn.Module) -> list[str]:
    """Names of all modules that get an adapter: every linear map and both patch embeddings, used or not."""
    return [
        name
        for name, module in network.named_modules()
        if name.split(".")[0] in ADAPTED_PARTS and isinstance(module, nn.Linear | nn.Conv2d | Nf4Linear)
    ]


def add_lora(network: nn.Module, rank: int, alpha: int, seed: int = 0, targets: Sequence[str] | None = None) -> None:
    """Freeze the network and put adapters on `targets` (default: all). They change nothing until trained: B is zero.

    A is normal with standard deviation 1 / rank ("gaussian" in peft), drawn on the CPU in the order of the targets, so
    that a seed means the same adapter on every device. Linear maps of one input become one layer (`TOGETHER`).
    """
    existing = lora_targets(network)
    if unknown := sorted(set(targets or ()) - set(existing)):
        raise BadInput(f"the adapter has {len(unknown)} modules that its base lacks, first {unknown[0]}: another base")
    adapted = set(existing if targets is None else targets)
    network.requires_grad_(False)
    parents = [(name, module) for name, module in network.named_modules() if next(module.children(), None) is not None]
    for name, parent in parents:
        _replace_children(parent, _adapted_children(name, parent, adapted, rank, alpha))
    layers = [(name, module) for name, module in network.named_modules() if isinstance(module, LoraLayer)]
    # torch takes every attribute of a module for a tensor or a module.
    matrices: list[Tensor] = [matrix for _, layer in layers for matrix in (layer.lora_A, layer.lora_B)]
    network.adapters = Adapters(layers, matrices)  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(seed)
    for _, (down, _) in named_adapters(network):
        if not down.is_meta:
            with torch.no_grad():
                down.copy_(torch.randn(down.shape, generator=generator) / rank)
    network.eval()


def _adapted_children(name: str, parent: nn.Module, adapted: set[str], rank: int, alpha: int) -> dict[str, nn.Module]:
    """A module's children as they will be, in the order of those whose place they take."""
    old: dict[str, Any] = dict(parent.named_children())  # linear maps and convolutions, where they are wanted
    wanted = {child: f"{name}.{child}".lstrip(".") in adapted for child in old}
    together = {
        members[0]: child
        for child, members in TOGETHER.items()
        if all(isinstance(old.get(member), nn.Linear) for member in members)
    }
    merged = {member for child in together.values() for member in TOGETHER[child]}
    new: dict[str, nn.Module] = {}
    for child, module in old.items():
        if child in together:
            members = TOGETHER[together[child]]
            flags = [wanted[member] for member in members]
            new[together[child]] = LoraLinear([old[member] for member in members], flags, rank, alpha)
        elif child not in merged and wanted[child]:
            new[child] = with_adapter(module, rank, alpha)
        elif child not in merged:
            new[child] = module
    return new


def _replace_children(parent: nn.Module, children: dict[str, nn.Module]) -> None:
    old = dict(parent.named_children())
    if list(children.values()) == list(old.values()):
        return
    for child in old:
        delattr(parent, child)
    for child, module in children.items():
        parent.add_module(child, module)
    if any(p.is_cuda for p in parent.parameters()):
        torch.cuda.empty_cache()  # what was replaced has other sizes than what comes next


def lora_layers(network: nn.Module) -> list[tuple[str, LoraLayer]]:
    """(name, layer) of all layers that have adapters or may have had some."""
    adapters = _adapters_of(network)
    return [] if adapters is None else adapters.layers


def _adapters_of(network: nn.Module) -> Adapters | None:
    return vars(network).get("adapters")


def named_adapters(network: nn.Module) -> list[tuple[str, tuple[Tensor, Tensor]]]:
    """(name of the linear map in the base network, (A, B)) of all adapters, in the order of `lora_targets`."""
    found: list[tuple[str, tuple[Tensor, Tensor]]] = []
    for name, layer in lora_layers(network):
        parent, _, child = name.rpartition(".")
        members = TOGETHER.get(child, (child,))
        with_adapter = [m for m, has in zip(members, layer.adapted, strict=True) if has]
        names = [f"{parent}.{member}".lstrip(".") for member in with_adapter]
        found += zip(names, layer.adapters(), strict=True)
    return found


def refresh_adapters(network: nn.Module, force: bool = False) -> None:
    """Bring the stored copies of all adapters up to date: before a forward pass that follows a change.

    force: after weights were moved, or written to behind autograd's back (through .data).
    """
    adapters = _adapters_of(network)
    if adapters is None:
        return
    version = sum(matrix._version for matrix in adapters.matrices)  # versions only grow; see Policy.parameters_changed
    if version == adapters.refreshed and not force:
        return
    if adapters.stored is None or force:
        adapters.stored = StoredAdapters([layer for _, layer in adapters.layers if isinstance(layer, LoraLinear)])
    adapters.stored.refresh()
    adapters.refreshed = version


def num_frozen_parameters(network: nn.Module) -> int:
    """Parameters of the base network; the room for the adapters in its weights does not count."""
    frozen = sum(p.numel() for p in network.parameters() if not p.requires_grad) + num_in_4bit(network)
    layers = (layer for _, layer in lora_layers(network) if isinstance(layer, LoraLinear))
    return frozen - sum(layer.weight[:, layer.in_features :].numel() for layer in layers)


@contextmanager
def adapters_disabled(network: nn.Module) -> Iterator[None]:
    """The base network without its adapters. May be nested; what was disabled before stays disabled after."""
    layers = [layer for _, layer in lora_layers(network) if layer.enabled]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def linear_rows(layer: nn.Linear | LoraLinear, x: Tensor, rows: slice) -> Tensor:
    """`layer(x)[..., rows]` in float32 without computing the other rows; `layer` is linear, with adapter or without."""
    return layer.rows(x, rows) if isinstance(layer, LoraLinear) else F.linear(x, layer.weight[rows]).float()


def save_lora(network: nn.Module, folder: Path, base_model: str, base_fingerprint: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which peft's PeftModel.from_pretrained reads too."""
    from peft import LoraConfig  # a second; where bitsandbytes is installed, it imports that, which takes two more

    adapters = named_adapters(network)
    first = lora_layers(network)[0][1]
    config = LoraConfig(
        r=first.rank,
        lora_alpha=first.alpha,
        lora_dropout=0.0,
        init_lora_weights="gaussian",
        target_modules=[name for name, _ in adapters],
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    tensors = {
        f"{KEY_PREFIX}{name}.{matrix}.weight": tensor.contiguous()
        for name, pair in adapters
        for matrix, tensor in zip(MATRICES, pair, strict=True)
    }
    metadata = {"base_fingerprint": base_fingerprint} | ({BASE_WEIGHTS: NF4} if num_in_4bit(network) else {})
    write_tensors(folder / WEIGHTS_FILE, tensors, metadata)


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter in peft's format. Raises BadInput that names the file when it is not a plain LoRA adapter."""
    where = folder / CONFIG_FILE
    config = read_json(where)
    refused = [
        key for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out") if config.get(key)
    ]
    if config.get("peft_type") != "LORA" or refused or config.get("bias", "none") != "none":
        raise BadInput(
            f"{where}: expected a plain LoRA adapter, found peft_type {brief(config.get('peft_type'))} "
            f"with {', '.join(refused) or 'bias ' + brief(config.get('bias'))}: merge it with the program that made it"
        )
    path = folder / WEIGHTS_FILE
    tensors = {}
    for key, tensor in read_tensors(path).items():
        name = key.removeprefix(KEY_PREFIX).removesuffix(".weight")
        if name.rpartition(".")[2] not in MATRICES:
            raise BadInput(f"{path}: unexpected tensor {key}: a LoRA adapter holds lora_A and lora_B weights only")
        tensors[name] = tensor
    rank, alpha = required(config, "r", str(where)), required(config, "lora_alpha", str(where))
    for name, value in (("r", rank), ("lora_alpha", alpha)):
        if type(value) is not int or not 1 <= value <= LARGEST_RANK:
            raise BadInput(f"{where}: {name} is {brief(value)}, expected a number from 1 to {LARGEST_RANK}")
    base = config.get("base_model_name_or_path") or None
    metadata = read_metadata(path)
    base_fingerprint = metadata.get("base_fingerprint")
    for name, value in (("base_model_name_or_path", base), ("base_fingerprint", base_fingerprint)):
        if value is not None and not isinstance(value, str):
            raise BadInput(f"{folder}: {name} is {brief(value)}, expected a text")
    adapter = Adapter(folder, rank, alpha, base, base_fingerprint, metadata.get(BASE_WEIGHTS) == NF4, tensors)
    _check_pairs(adapter)
    return adapter


def _check_pairs(adapter: Adapter) -> None:
    """Raises BadInput unless every module has an A (rank, ...) and a B (..., rank): allocations follow the rank."""
    path = adapter.folder / WEIGHTS_FILE
    if len(adapter.tensors) != 2 * len(adapter.targets) or not adapter.targets:
        raise BadInput(f"{path}: {len(adapter.tensors)} tensors are no pairs of lora_A and lora_B")
    for name in adapter.targets:
        down, up = adapter.tensors[f"{name}.lora_A"], adapter.tensors.get(f"{name}.lora_B")
        if up is None or down.ndim < 2 or up.ndim < 2 or not down.shape[0] == up.shape[1] == adapter.rank:
            raise BadInput(f"{path}: {name} has no lora_A and lora_B of rank {adapter.rank}, as {CONFIG_FILE} says")
        if not down.is_floating_point() or not up.is_floating_point():
            raise BadInput(f"{path}: {name} holds other than floating-point numbers")


def fill_lora(network: nn.Module, adapter: Adapter) -> None:
    """Copy an adapter's tensors into the network's adapters. Raises BadInput when the two have different shapes."""
    path = adapter.folder / WEIGHTS_FILE
    ours = dict(named_adapters(network))
    if set(adapter.targets) != set(ours):
        unmatched = sorted(set(adapter.targets) ^ set(ours))
        raise BadInput(f"{path}: {len(unmatched)} modules differ from this policy's adapters, first {unmatched[0]}")
    layer = lora_layers(network)[0][1]
    if layer.scale != adapter.alpha / adapter.rank:
        raise BadInput(
            f"{adapter.folder / CONFIG_FILE}: alpha {adapter.alpha} at rank {adapter.rank}, this policy has "
            f"{layer.alpha} at rank {layer.rank}: give the same LoRA flags"
        )
    for name, pair in ours.items():
        for matrix, parameter in zip(MATRICES, pair, strict=True):
            stored = adapter.tensors.get(f"{name}.{matrix}")
            if stored is None or stored.shape != parameter.shape:
                found = "none" if stored is None else tuple(stored.shape)
                raise BadInput(f"{path}: {name}.{matrix}: expected shape {tuple(parameter.shape)}, found {found}")
            with torch.no_grad():
                parameter.copy_(stored)
    refresh_adapters(network)


def check_base(adapter: Adapter, base_fingerprint: str, base: str) -> None:
    """Raises BadInput when the adapter was trained on other weights than those with this fingerprint."""
    if adapter.base_fingerprint is not None and adapter.base_fingerprint != base_fingerprint:
        raise BadInput(
            f"{adapter.folder}: this adapter was trained on other weights ({adapter.base_model}, fingerprint "
            f"{adapter.base_fingerprint[:12]}) than {base} (fingerprint {base_fingerprint[:12]}): give its own base"
        )
