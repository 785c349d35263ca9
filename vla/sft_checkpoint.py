"""Where fine-tuning starts and what it writes: checkpoint folders in the format of OpenVLA-OFT."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from contracts import write_json
from demonstrations import ACTION_DIM, CHUNK_LENGTH, PROPRIO_DIM
from errors import BadInput
from untrusted.json_file import read_json
from vla.checkpoint import CheckpointInfo, inspect_checkpoint, load_network, resolve_checkpoint, save_checkpoint
from vla.model import OpenVLAOFT
from vla.settings import TinySize
from vla.tiny import make_tiny_checkpoint

NUM_ACTION_TOKENS = CHUNK_LENGTH * ACTION_DIM
# Of the initial checkpoint; the other files are written anew.
COPIED_FILES = ("preprocessor_config.json", "processor_config.json", "tokenizer.json", "tokenizer.model",
                "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # fmt: skip


@contextmanager
def initial_checkpoint(init: str | None, size: TinySize, num_images: int | None, seed: int) -> Iterator[CheckpointInfo]:
    """The checkpoint `init`, or a temporary one with random weights in the sizes given."""
    if init is not None:
        info = inspect_checkpoint(resolve_checkpoint(init), num_images)
        _check_kind(info)
        yield info
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            make_tiny_checkpoint(Path(folder), seed=seed, num_images=num_images or 2, size=size)
        except (ValueError, AssertionError, RuntimeError, ZeroDivisionError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadInput(f"--size: no network can be built from {size} ({reason}): choose other sizes") from error
        yield inspect_checkpoint(Path(folder))


def _check_kind(info: CheckpointInfo) -> None:
    """Raises BadInput for a checkpoint that decides on other things than the demonstrations hold."""
    if info.chunk_length(ACTION_DIM) != CHUNK_LENGTH:
        raise BadInput(
            f"--init {info.folder}: its chunks have {info.chunk_length(ACTION_DIM)} actions, "
            f"those of demonstrations {CHUNK_LENGTH}: give another checkpoint"
        )


def load_trainable(info: CheckpointInfo, device: torch.device) -> OpenVLAOFT:
    """The network in float32. Raises BadInput when its proprio projector has other inputs than demonstrations."""
    network = load_network(info, NUM_ACTION_TOKENS, device, torch.float32)
    projector = network.proprio_projector
    if projector is not None and projector.proprio_dim != PROPRIO_DIM:
        raise BadInput(
            f"{info.folder}: its proprio projector reads {projector.proprio_dim} values, "
            f"demonstrations have {PROPRIO_DIM}: give another checkpoint"
        )
    return network


def save_policy(
    folder: Path, network: OpenVLAOFT, init: CheckpointInfo, statistics: dict[str, Any], dtype: torch.dtype
) -> None:
    """A whole checkpoint folder: weights in `dtype`, `statistics` {key: entry}, the other files those of `init`.

    An L1 head of `init` stays behind: it reads hidden states that training has changed. As the head is also how the
    number of images is found out, config.json states that number.
    """
    config = read_json(init.folder / "config.json")
    name = str(dtype).removeprefix("torch.")
    changes = {"num_images_in_input": init.num_images, "norm_stats": statistics, "torch_dtype": name}
    text_config = config.get("text_config", {}) | {"torch_dtype": name}
    save_checkpoint(folder, network, config | changes | {"text_config": text_config}, dtype=dtype)
    write_json(folder / "dataset_statistics.json", statistics)
    for file in COPIED_FILES:
        if (init.folder / file).is_file():
            shutil.copyfile(init.folder / file, folder / file)


def network_facts(network: OpenVLAOFT, info: CheckpointInfo) -> dict[str, Any]:
    """For the model card."""
    llama = network.language_model
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "vocabulary_parameters": llama.model.embed_tokens.weight.numel() + llama.lm_head.weight.numel(),
        "num_images": info.num_images,
        "image_size": info.config.vits[0].image_size,
        "image_tokens": info.num_images * network.vision_backbone.num_patches,
        "proprio": network.proprio_projector is not None,
    }
