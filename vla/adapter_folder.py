"""A trained policy on disk: an adapter in peft's format, the trained proprio projector, and the base's small files."""

import shutil
from pathlib import Path

import torch

from errors import BadInput
from untrusted.json_file import read_json
from vla.heads import ProprioProjector
from vla.hub import resolve_checkpoint
from vla.lora import CONFIG_FILE, save_lora
from vla.openvla_oft import OpenVLAOFT
from vla.weights import read_tensors, weight_files, write_tensors

PROPRIO_FILE = "proprio_projector.safetensors"
SAMPLES_FILE = "sample_observations.npz"  # of the run; a merge is checked on them
# What evaluation reads besides weights; missing ones are skipped, for not every base has all of them.
SMALL_FILES = (
    "dataset_statistics.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def base_of_adapter(folder: Path) -> str | None:
    """The base (folder or hub id) that an adapter folder names; None when the folder is no adapter.

    Raises BadInput for an adapter that names no base, and for a training folder of openvla-oft that was never merged.
    """
    if (folder / CONFIG_FILE).is_file():
        base = read_json(folder / CONFIG_FILE).get("base_model_name_or_path")
        if not isinstance(base, str) or not base or not base.isprintable():
            raise BadInput(f"{folder / CONFIG_FILE} names no base: give the base as checkpoint and this as adapter")
        return base
    if (folder / "lora_adapter").is_dir() and not any(path.is_file() for path in weight_files(folder)):
        raise BadInput(
            f"{folder} holds an adapter that was not merged (lora_adapter) and no weights: merge it first with "
            f"openvla-oft's vla-scripts/merge_lora_weights_and_save.py"
        )
    return None


def base_and_adapter(checkpoint: str, adapter: str | None) -> tuple[str, str | None]:
    """A checkpoint that is itself an adapter folder becomes its base and that adapter. Raises BadInput."""
    base = base_of_adapter(Path(checkpoint).expanduser())
    if base is None:
        return checkpoint, adapter
    if adapter is not None:
        raise BadInput(f"{checkpoint} is itself an adapter: give its base as the checkpoint")
    return base, str(Path(checkpoint).expanduser())


def folder_of_base(base: str, adapter: str | None) -> Path:
    """The local folder of a base (folder or hub id). Raises BadInput, which says where an adapter's base is named."""
    try:
        return resolve_checkpoint(base)
    except BadInput as problem:
        raise BadInput(str(problem) if adapter is None else f"base of {adapter}: {problem}") from None


def save_adapter_folder(
    folder: Path, network: OpenVLAOFT, base_folder: Path, base_model: str, base_fingerprint: str
) -> None:
    """Write the adapter, the proprio projector if there is one, and copies of the base's small files."""
    save_lora(network, folder, base_model, base_fingerprint)
    if network.proprio_projector is not None:
        write_tensors(folder / PROPRIO_FILE, network.proprio_projector.state_dict())
    for name in SMALL_FILES:
        if (base_folder / name).is_file():
            shutil.copyfile(base_folder / name, folder / name)


def load_proprio(network: OpenVLAOFT, folder: Path) -> None:
    """Copy the folder's proprio projector into the network's. Raises BadInput when the two do not fit.

    A folder without one, made by another program, leaves the network's as it is.
    """
    path = folder / PROPRIO_FILE
    projector: ProprioProjector | None = network.proprio_projector
    if not path.exists():
        return
    if projector is None:
        raise BadInput(f"{path}: this adapter was trained with proprio, the checkpoint has none: give its own base")
    stored = read_tensors(path)
    for name, parameter in projector.named_parameters():
        if name not in stored or stored[name].shape != parameter.shape:
            found = tuple(stored[name].shape) if name in stored else "none"
            raise BadInput(f"{path}: {name}: expected shape {tuple(parameter.shape)}, found {found}")
        with torch.no_grad():
            parameter.copy_(stored[name])
