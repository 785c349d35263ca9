"""A trained policy on disk: an adapter in peft's format, the trained proprio projector, and the base's small files."""

import shutil
from pathlib import Path

import torch

from errors import BadInput
from vla.heads import ProprioProjector
from vla.lora import save_lora
from vla.openvla_oft import OpenVLAOFT
from vla.weights import read_tensors, write_tensors

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
