"""Read the parts of a policy from a checkpoint: network, adapters, heads, tokenizer and image processor.

A checkpoint is a folder or hub id in OpenVLA-OFT's format, or the folder of an adapter, which names its base.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from contracts import BadInput, first_line
from vla.adapter_folder import StoredAdapter, base_and_adapter, read_adapter
from vla.adapters import add_lora
from vla.checkpoint import CheckpointInfo, inspect_checkpoint
from vla.dataset_statistics import STATISTICS_FILE, scale_digest, select_key
from vla.device import choose_device, limit_memory
from vla.eight_bits import check_device
from vla.heads import L1RegressionHead
from vla.hub import resolve_checkpoint
from vla.load_options import FrozenWeights, LoadOptions
from vla.model import OpenVLAOFT
from vla.network_io import load_l1_head, load_network
from vla.preprocessing import ImageProcessor
from vla.prompts import load_tokenizer


@dataclass(frozen=True)
class PolicyParts:
    """What `load_parts` reads, and `Policy` is built from."""

    info: CheckpointInfo
    options: LoadOptions  # see `settle_options`
    unnorm_key: str
    base_model: str  # the base checkpoint: an absolute folder, or a hub id
    tokenizer: Tokenizer
    processor: ImageProcessor
    network: OpenVLAOFT  # with new adapters
    l1_head: L1RegressionHead | None
    adapter: StoredAdapter | None  # the trained adapter, whose values are not yet in the network


def load_parts(checkpoint: str, options: LoadOptions) -> PolicyParts:
    """Read a checkpoint. Raises BadInput for what the user can repair, where possible before reading the weights."""
    base, adapter_folder = base_and_adapter(checkpoint)
    device = choose_device(options.device, base)
    if device.index is not None:
        torch.cuda.set_device(device)  # CUDA graphs are recorded on the current one
    limit_memory(options.memory_budget, device)
    folder = resolve_checkpoint(base)
    info = inspect_checkpoint(folder, options.num_images, adapter_folder, options.statistics)
    tokenizer = load_tokenizer(folder)
    processor = ImageProcessor.load(folder)
    check_image_sizes(folder, processor, info)
    adapter = None if adapter_folder is None else read_adapter(Path(adapter_folder))
    if adapter is not None and options.statistics is None:
        check_scale(adapter, info)
        options = replace(options, unnorm_key=options.unnorm_key or adapter.unnorm_key)
    unnorm_key = select_key(info.statistics_folder, info.statistics, options.task_suite, options.unnorm_key)
    options = settle_options(options, device, adapter, info.config.llama.num_hidden_layers)
    try:
        network, head = _load_networks(info, unnorm_key, options, device)
    except torch.OutOfMemoryError as error:
        raise BadInput(
            f"out of GPU memory while loading {checkpoint} ({first_line(error)}): close other programs on it, "
            "raise --memory-budget, use a larger one, or in vla.merge --device cpu"
        ) from None
    base_model = str(folder.resolve()) if Path(base).expanduser().is_dir() else base
    return PolicyParts(info, options, unnorm_key, base_model, tokenizer, processor, network, head, adapter)


def check_scale(adapter: StoredAdapter, info: CheckpointInfo) -> None:
    """Raise BadInput if the statistics that an adapter was trained with are no longer among the checkpoint's."""
    if adapter.scale not in (None, *map(scale_digest, info.statistics.values())):
        raise BadInput(
            f"{info.statistics_folder} has no statistics that scale as in the training of {adapter.folder}: "
            f"copy its own {STATISTICS_FILE} there again"
        )


def check_image_sizes(folder: Path, processor: ImageProcessor, info: CheckpointInfo) -> None:
    """Raise BadInput if the image processor's pictures are not of the size that the network reads."""
    processor_sizes = {side for _, *sides in processor.input_sizes for side in sides}
    network_sizes = set(info.config.image_sizes)
    if len(processor_sizes | network_sizes) > 1:
        raise BadInput(
            f"{folder}: the image processor makes pictures of {_joined(processor_sizes)} pixels a side, but the "
            f"network of config.json reads {_joined(network_sizes)}: get both files from one checkpoint"
        )


def _joined(numbers: set[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def check_heads(
    info: CheckpointInfo, unnorm_key: str, network: OpenVLAOFT, head: L1RegressionHead | None
) -> None:
    """Raise BadInput if projector or L1 head have other sizes than the statistics of robot states or actions."""
    statistics = info.statistics[unnorm_key]
    projector = network.proprio_projector
    proprio_dim = 0 if statistics.proprio is None else statistics.proprio.dim
    sizes = {"robot states": (proprio_dim if projector is None else projector.proprio_dim, proprio_dim)}
    if head is not None:
        sizes["actions"] = (head.action_dim, statistics.action.dim)
    for what, (in_network, in_statistics) in sizes.items():
        if in_network != in_statistics:
            raise BadInput(
                f"{info.statistics_folder}: the network has {what} of {in_network} numbers, its statistics "
                f"({unnorm_key}) of {in_statistics}: copy the training run's {STATISTICS_FILE} here"
            )


def settle_options(
    options: LoadOptions, device: torch.device, adapter: StoredAdapter | None, num_blocks: int
) -> LoadOptions:
    """Replace what is `auto` or follows from the trained adapter, if there is one. Raises BadInput.

    num_blocks: of the language model.
    """
    if adapter is not None:
        own_blocks = adapter.trained_blocks(num_blocks)
        if options.trained_blocks not in (None, own_blocks):
            raise BadInput(
                f"--trained-blocks {options.trained_blocks}: {adapter.folder} keeps its own ({own_blocks or 'all'}); "
                "to change them merge it (python -m vla.merge), and give the result"
            )
        options = replace(
            options,
            lora_rank=adapter.rank,
            lora_alpha=adapter.alpha,
            trained_blocks=own_blocks,
            l1_student=adapter.l1_student,
        )
    elif options.trained_blocks is not None and options.trained_blocks > num_blocks:
        raise BadInput(
            f"--trained-blocks {options.trained_blocks}: the language model has {num_blocks} blocks"
        )
    if options.frozen_weights == "auto":
        usual: FrozenWeights = "bf16" if device.type == "cuda" else "float32"
        was_int8 = adapter is not None and adapter.frozen_weights == "int8"
        options = replace(options, frozen_weights="int8" if was_int8 else usual)
    if options.frozen_weights == "int8":
        check_device(device)
    return options


def _load_networks(
    info: CheckpointInfo, unnorm_key: str, options: LoadOptions, device: torch.device
) -> tuple[OpenVLAOFT, L1RegressionHead | None]:
    """Load the network, with new adapters, and the L1 head."""
    frozen_weights = options.frozen_weights
    # Of all frozen weights that are not int8
    is_exact = frozen_weights == "float32" or (frozen_weights != "bf16" and device.type == "cpu")
    dtype = torch.float32 if is_exact else torch.bfloat16
    num_action_tokens = info.config.chunk_length * info.statistics[unnorm_key].action.dim
    network = load_network(info, num_action_tokens, device, dtype, frozen_weights == "int8")
    if options.trained_blocks is not None:
        network.train_last_blocks(options.trained_blocks)
    rank = options.lora_rank
    alpha = rank if options.lora_alpha is None else options.lora_alpha
    network.adapters = add_lora(network, rank, alpha, network.dtype, options.seed, network.frozen_parts())
    head = load_l1_head(info, device, dtype)
    check_heads(info, unnorm_key, network, head)
    network.l1_head = head if options.l1_student == "laplace" else None
    return network, head
