"""Write checkpoint folders in the format of OpenVLA-OFT, so that its programs and ours load them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla.checkpoint import file_key
from vla.lora import lora_layers
from vla.model import L1RegressionHead, OpenVLAOFT
from vla.prompt import BOS_ID, EOS_ID, PAD_ID
from vla.weights import INDEX_FILE, SINGLE_FILE, write_tensors

MAX_SHARD_BYTES = 5_000_000_000  # four shards at 7B in bfloat16, as published
_WRITTEN_BY = "4.40.1"  # the version of transformers that openvla-oft runs on


def save_checkpoint(
    folder: Path,
    network: OpenVLAOFT,
    config: dict[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    action_head: L1RegressionHead | None = None,
    step: str = "latest",
) -> None:
    """Write weights, config.json, generation_config.json and the heads; the other files come from where config does.

    The heads keep their dtypes. Raises ValueError for a network with adapters (`python -m vla.merge` merges them).
    """
    if lora_layers(network):
        raise ValueError("the network has adapters, which this format cannot hold: merge them first")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    write_json(
        folder / "generation_config.json", {"_from_model_config": True, **ids, "transformers_version": _WRITTEN_BY}
    )
    state = {
        file_key(name): tensor
        for name, tensor in network.state_dict().items()
        if not name.startswith("proprio_projector.")
    }
    write_weights(folder, state, dtype)
    if network.proprio_projector is not None:
        write_state_dict(folder / f"proprio_projector--{step}_checkpoint.pt", network.proprio_projector.state_dict())
    if action_head is not None:
        write_state_dict(folder / f"action_head--{step}_checkpoint.pt", action_head.state_dict())


def write_weights(folder: Path, state: dict[str, Tensor], dtype: torch.dtype, max_bytes: int = MAX_SHARD_BYTES) -> None:
    """One model.safetensors, or several shards and their index. Peak memory is one shard."""
    sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in state.items()}
    shards = plan_shards(sizes, max_bytes)
    files = [SINGLE_FILE] if len(shards) == 1 else [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]  # fmt: skip
    for file, names in zip(files, shards, strict=True):
        write_tensors(folder / file, {name: state[name].detach().to("cpu", dtype) for name in names})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def plan_shards(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Names in their order, cut into runs of at most `max_bytes` (a larger tensor gets a shard of its own).

    plan_shards({"a": 3, "b": 2, "c": 4}, max_bytes=5) == [["a", "b"], ["c"]]
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def write_state_dict(path: Path, state: dict[str, Tensor]) -> None:
    """A `.pt` state dict as openvla-oft's distributed training writes it: names begin with `module.`."""
    torch.save({f"module.{name}": tensor.detach().cpu() for name, tensor in state.items()}, path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
