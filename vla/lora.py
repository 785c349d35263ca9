"""LoRA adapters on every linear map of the network, by peft with an explicit list of targets.

openvla-oft trains with peft 0.11 and "all-linear", which there meant every nn.Linear plus every module that shares a
linear layer's last name: both patch embeddings (convolutions called `proj`) and `lm_head`. Newer versions of peft mean
something else by it, so the targets are listed: 439 modules and 878 tensors in the 7B network.

Adapters are float32 over a base of any dtype, and saved in peft's own format.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from errors import BadInput
from vla.json_file import read_json, required
from vla.weights import read_metadata, read_tensors, write_tensors

ADAPTER_NAME = "default"
ADAPTED_PARTS = ("vision_backbone", "projector", "language_model")  # of the network; the proprio projector has none
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MATRICES = ("lora_A", "lora_B")
KEY_PREFIX = "base_model.model."  # peft's name for the module that it wraps


@dataclass(frozen=True)
class Adapter:
    """An adapter folder, read."""

    folder: Path
    rank: int
    alpha: int
    base_model: str | None  # folder or hub id of the checkpoint that it was trained on
    base_fingerprint: str | None  # `vla.weights.fingerprint` of that checkpoint; None: trained by another program
    tensors: dict[str, Tensor]  # "<module>.lora_A", "<module>.lora_B", as stored

    @property
    def targets(self) -> list[str]:
        return [name.removesuffix(".lora_A") for name in self.tensors if name.endswith(".lora_A")]


def lora_targets(network: nn.Module) -> list[str]:
    """Names of all modules that get an adapter: every linear map and both patch embeddings, used or not."""
    return [
        name
        for name, module in network.named_modules()
        if name.split(".")[0] in ADAPTED_PARTS and isinstance(module, nn.Linear | nn.Conv2d)
    ]


def add_lora(network: nn.Module, rank: int, alpha: int, seed: int = 0, targets: Sequence[str] | None = None) -> None:
    """Freeze the network and put adapters on `targets` (default: all). They change nothing until trained: B is zero.

    A is normal with standard deviation 1 / rank ("gaussian" in peft), drawn on the CPU in the order of the targets, so
    that a seed means the same adapter on every device.
    """
    existing = lora_targets(network)
    if unknown := sorted(set(targets or ()) - set(existing)):
        raise BadInput(f"the adapter has {len(unknown)} modules that its base lacks, first {unknown[0]}: another base")
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        init_lora_weights="gaussian",
        target_modules=list(existing if targets is None else targets),
    )
    network.requires_grad_(False)
    inject_adapter_in_model(config, network, adapter_name=ADAPTER_NAME)
    generator = torch.Generator().manual_seed(seed)
    for _, layer in lora_layers(network):
        down, up = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        down.data, up.data = down.data.float(), torch.zeros_like(up.data, dtype=torch.float32)
        if not down.is_meta:
            down.data.copy_(torch.randn(down.shape, generator=generator) / rank)
    network.eval()


def lora_layers(network: nn.Module) -> list[tuple[str, LoraLayer]]:
    """(name, layer) of all adapted modules, in the network's order."""
    return [(name, module) for name, module in network.named_modules() if isinstance(module, LoraLayer)]


@contextmanager
def adapters_disabled(network: nn.Module) -> Iterator[None]:
    """The base network without its adapters. May be nested; what was disabled before stays disabled after."""
    layers = [layer for _, layer in lora_layers(network) if not layer.disable_adapters]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def linear_rows(layer: nn.Module, x: Tensor, rows: slice) -> Tensor:
    """`layer(x)[..., rows]` in float32 without computing the other rows; `layer` is linear, with adapter or without.

    The base's product is rounded to its dtype, as in the reference; the adapter's share is added in float32.
    """
    if not isinstance(layer, LoraLayer):
        return F.linear(x, layer.weight[rows]).float()
    base = F.linear(x, layer.base_layer.weight[rows]).float()
    if layer.disable_adapters:
        return base
    low_rank = layer.lora_A[ADAPTER_NAME](x.float())
    return base + F.linear(low_rank, layer.lora_B[ADAPTER_NAME].weight[rows]) * layer.scaling[ADAPTER_NAME]


def save_lora(network: nn.Module, folder: Path, base_model: str, base_fingerprint: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which peft's PeftModel.from_pretrained reads too."""
    layers = lora_layers(network)
    first = layers[0][1]
    config = LoraConfig(
        r=first.r[ADAPTER_NAME],
        lora_alpha=first.lora_alpha[ADAPTER_NAME],
        lora_dropout=0.0,
        init_lora_weights="gaussian",
        target_modules=[name for name, _ in layers],
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    tensors = {
        f"{KEY_PREFIX}{name}.{matrix}.weight": getattr(layer, matrix)[ADAPTER_NAME].weight
        for name, layer in layers
        for matrix in MATRICES
    }
    write_tensors(folder / WEIGHTS_FILE, tensors, {"base_fingerprint": base_fingerprint})


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter in peft's format. Raises BadInput that names the file when it is not a plain LoRA adapter."""
    config = read_json(folder / CONFIG_FILE)
    refused = [
        key for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out") if config.get(key)
    ]
    if config.get("peft_type") != "LORA" or refused or config.get("bias", "none") != "none":
        raise BadInput(
            f"{folder / CONFIG_FILE}: expected a plain LoRA adapter, found peft_type {config.get('peft_type')} "
            f"with {', '.join(refused) or 'bias ' + str(config.get('bias'))}: merge it with the program that made it"
        )
    path = folder / WEIGHTS_FILE
    tensors = {}
    for key, tensor in read_tensors(path).items():
        name = key.removeprefix(KEY_PREFIX).removesuffix(".weight")
        if name.rpartition(".")[2] not in MATRICES:
            raise BadInput(f"{path}: unexpected tensor {key}: a LoRA adapter holds lora_A and lora_B weights only")
        tensors[name] = tensor
    return Adapter(
        folder=folder,
        rank=required(config, "r", str(folder / CONFIG_FILE)),
        alpha=required(config, "lora_alpha", str(folder / CONFIG_FILE)),
        base_model=config.get("base_model_name_or_path") or None,
        base_fingerprint=read_metadata(path).get("base_fingerprint"),
        tensors=tensors,
    )


def fill_lora(network: nn.Module, adapter: Adapter) -> None:
    """Copy an adapter's tensors into the network's adapters. Raises BadInput when the two have different shapes."""
    path = adapter.folder / WEIGHTS_FILE
    layers = dict(lora_layers(network))
    if set(adapter.targets) != set(layers):
        unmatched = sorted(set(adapter.targets) ^ set(layers))
        raise BadInput(f"{path}: {len(unmatched)} modules differ from this policy's adapters, first {unmatched[0]}")
    for name, layer in layers.items():
        if layer.scaling[ADAPTER_NAME] != adapter.alpha / adapter.rank:
            raise BadInput(
                f"{adapter.folder / CONFIG_FILE}: alpha {adapter.alpha} at rank {adapter.rank}, this policy has "
                f"{layer.lora_alpha[ADAPTER_NAME]} at rank {layer.r[ADAPTER_NAME]}: give the same LoRA flags"
            )
        for matrix in MATRICES:
            parameter = getattr(layer, matrix)[ADAPTER_NAME].weight
            stored = adapter.tensors.get(f"{name}.{matrix}")
            if stored is None or stored.shape != parameter.shape:
                found = "none" if stored is None else tuple(stored.shape)
                raise BadInput(f"{path}: {name}.{matrix}: expected shape {tuple(parameter.shape)}, found {found}")
            parameter.data.copy_(stored)


def check_base(adapter: Adapter, base_fingerprint: str, base: str) -> None:
    """Raises BadInput when the adapter was trained on other weights than those with this fingerprint."""
    if adapter.base_fingerprint is not None and adapter.base_fingerprint != base_fingerprint:
        raise BadInput(
            f"{adapter.folder}: this adapter was trained on other weights ({adapter.base_model}, fingerprint "
            f"{adapter.base_fingerprint[:12]}) than {base} (fingerprint {base_fingerprint[:12]}): give its own base"
        )
