"""The folder of a trained policy: an adapter in peft's format, the proprio projector, and the statistics.

All else that a policy needs is in the base checkpoint, which the folder names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from contracts import BadInput, read_json, resolve_pointer, undamaged, write_json
from vla.hub import HUB_ID
from vla.load_options import L1Student
from vla.model import OpenVLAOFT
from vla.weights import read_header, read_tensors, write_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_PROPRIO_FILE = "proprio_projector.safetensors"
# Names of the language model's blocks and token head
BLOCK_OR_HEAD = r"language_model\.(model\.layers\.(?P<index>\d+)\.|lm_head\.)"
KEY_PREFIX = "base_model.model."  # peft's name for the module that it wraps
# Starts of plain LoRA. Others, such as pissa, change the base before training, so the adapter alone is not the policy.
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter as read from its folder."""

    folder: Path
    rank: int
    alpha: int
    base_model: str | None  # folder or hub id of the checkpoint that it was trained on
    # `vla.weights.fingerprint` of that checkpoint; None if another program wrote it.
    base_fingerprint: str | None
    # `pt_fingerprint` of that checkpoint's L1 head; empty if it had none, None if another program wrote the adapter.
    head_fingerprint: str | None
    # `scale_digest` of the statistics by which its actions were scaled; None if another program wrote it.
    scale: str | None
    unnorm_key: str | None  # the key of these statistics, if it was given and there were others
    frozen_weights: str | None  # format of the frozen weights in training, see `Policy.frozen_weights`
    l1_student: L1Student  # see `LoadOptions.l1_student`
    tensors: dict[str, Tensor]  # by the names of `AdaptedLayers.named_matrices`

    def trained_blocks(self, num_blocks: int) -> int | None:
        """How many of the last of `num_blocks` blocks of the language model it changes; None if also what is below.

        None, too, for another program's adapter: what it leaves out is no sign of what may be trained.
        """
        if self.base_fingerprint is None:
            return None
        matches = [re.match(BLOCK_OR_HEAD, name) for name in self.tensors]
        if not matches or not all(matches):
            return None
        first = min(int(match["index"] or num_blocks - 1) for match in matches if match)
        return num_blocks - first


def base_and_adapter(checkpoint: str) -> tuple[str, str | None]:
    """The base (folder or hub id) that an adapter names, and the adapter's folder; (checkpoint, None) if it is none.

    It may also be a pointer to an adapter folder, such as RUN/checkpoints/best. Raises BadInput for RUN itself, and for
    a lost base.
    """
    folder = resolve_pointer(Path(checkpoint))
    for checkpoints in (folder, folder / "checkpoints"):
        if (checkpoints / "latest").is_file():
            raise BadInput(
                f"checkpoint {checkpoint} holds all checkpoints of a run: name one, such as {checkpoints / 'best'}"
            )
    path = folder / CONFIG_FILE
    if not path.is_file():
        return checkpoint, None
    base = str(read_json(path).get("base_model_name_or_path"))
    if not Path(base).expanduser().is_dir() and not HUB_ID.fullmatch(base):
        raise BadInput(f"{path}: base_model_name_or_path is {base}: write where the base is now")
    return base, str(folder)


def read_metadata(folder: Path) -> dict[str, str]:
    """What a trained adapter has recorded about its training: see `Policy.save_adapter`.

    It is empty where another program wrote the adapter. Raises BadInput for damaged weights.
    """
    return read_header(folder / WEIGHTS_FILE)[1]


def write_adapter(folder: Path, network: OpenVLAOFT, base_model: str, metadata: dict[str, str]) -> None:
    """Write a trained adapter so that this program and peft's PeftModel.from_pretrained can read it.

    Writes the adapter with `metadata`, and the proprio projector. base_model: the base's name, which the adapter's
    config stores.
    """
    matrices = network.adapters.named_matrices()
    # Written without peft's LoraConfig, which would add all fields of its version: peft 0.11.1, which openvla-oft uses,
    # refuses keys that only newer versions know. Fields that are left out have peft's default.
    config = {
        "peft_type": "LORA",
        "r": network.adapters.rank,
        "lora_alpha": network.adapters.alpha,
        "init_lora_weights": "gaussian",
        "target_modules": [name.removesuffix(".lora_A") for name in matrices if name.endswith(".lora_A")],
        "base_model_name_or_path": base_model,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG_FILE, config)
    tensors = {f"{KEY_PREFIX}{name}.weight": matrix for name, matrix in matrices.items()}
    write_tensors(folder / WEIGHTS_FILE, tensors, metadata)
    if network.proprio_projector is not None:
        write_tensors(folder / ADAPTER_PROPRIO_FILE, network.proprio_projector.state_dict())


def read_adapter(folder: Path) -> StoredAdapter:
    """Read an adapter in peft's format. Raises BadInput when it is not a plain LoRA adapter."""
    from peft import LoraConfig  # takes 0.3 s, which only a trained policy needs

    with undamaged(folder / CONFIG_FILE):
        config = LoraConfig.from_pretrained(str(folder))
    if (
        not isinstance(config, LoraConfig)
        or config.use_dora
        or config.use_rslora
        or config.alpha_pattern
        or config.modules_to_save
        or config.init_lora_weights not in PLAIN_STARTS
    ):
        raise BadInput(
            f"{folder / CONFIG_FILE}: only plain LoRA is read; merge the adapter into its base with the program that "
            "made it"
        )
    path = folder / WEIGHTS_FILE
    # Beside an adapter of the token head peft stores the head itself, too, which it has not changed.
    tensors = {
        key.removeprefix(KEY_PREFIX).removesuffix(".weight"): tensor
        for key, tensor in read_tensors(path).items()
        if not key.endswith(".base_layer.weight")
    }
    metadata = read_header(path)[1]
    return StoredAdapter(
        folder,
        config.r,
        config.lora_alpha,
        base_model=config.base_model_name_or_path,
        base_fingerprint=metadata.get("base_fingerprint"),
        head_fingerprint=metadata.get("head_fingerprint"),
        scale=metadata.get("scale"),
        unnorm_key=metadata.get("unnorm_key") or None,
        frozen_weights=metadata.get("frozen_weights"),
        l1_student="laplace" if metadata.get("l1_student") == "laplace" else "tokens",
        tensors=tensors,
    )


def copy_into_network(adapter: StoredAdapter, network: OpenVLAOFT) -> None:
    """Copy the values of a stored adapter, and of its proprio projector if it has one, into the network.

    Raises BadInput when they do not fit.
    """
    layers = network.adapters
    if layers.alpha / layers.rank != adapter.alpha / adapter.rank:
        raise BadInput(
            f"{adapter.folder / CONFIG_FILE}: alpha {adapter.alpha} at rank {adapter.rank}, this policy has "
            f"{layers.alpha} at rank {layers.rank}: give the same LoRA flags"
        )
    matrices = layers.named_matrices()
    # Maps that peft's target_modules leaves out are as in the base: B is zero.
    adapted = {name.rpartition(".")[0] for name in adapter.tensors}
    absent = {
        name: torch.zeros_like(matrix) if name.endswith("lora_B") else matrix
        for name, matrix in matrices.items()
        if name.rpartition(".")[0] not in adapted
    }
    _copy_tensors(matrices, {**adapter.tensors, **absent}, adapter.folder / WEIGHTS_FILE)
    layers.refresh()
    path = adapter.folder / ADAPTER_PROPRIO_FILE
    if path.exists() and network.proprio_projector is not None:
        _copy_tensors(network.proprio_projector.state_dict(), read_tensors(path), path)
    elif path.exists() or (network.proprio_projector is not None and adapter.base_fingerprint is not None):
        lacking = adapter.base_model if path.exists() else adapter.folder
        raise BadInput(
            f"{lacking} has lost the proprio projector that the adapter was trained with: copy it again"
        )


@torch.no_grad()
def _copy_tensors(targets: Mapping[str, Tensor], stored: Mapping[str, Tensor], path: Path) -> None:
    """Copy tensors by name. If one is missing or has another shape, raises BadInput and copies none."""
    target_shapes = {name: tensor.shape for name, tensor in targets.items()}
    stored_shapes = {name: tensor.shape for name, tensor in stored.items()}
    different = sorted(target_shapes.items() ^ stored_shapes.items())
    if different:
        raise BadInput(
            f"{path}: {different[0][0]} is missing, unknown or of another shape: it belongs to another base, has "
            "another rank than its config, or was trained on parts that have no adapters here"
        )
    for name, target in targets.items():
        target.copy_(stored[name])
