"""Make a small checkpoint with random weights in the real folder format, for tests or to train a small policy from.

The tokenizer, the statistics and the config fields that do not depend on sizes are those of the bundled policy.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from contracts import read_json, write_json
from vla.dataset_statistics import STATISTICS_FILE
from vla.heads import L1RegressionHead, ProprioProjector
from vla.model import OpenVLAOFT
from vla.network_config import read_network_config
from vla.network_io import save_network
from vla.prompts import load_tokenizer
from workshop.demo_files import CHUNK_LENGTH, LIBERO_SIZES
from workshop.sft_config import TinySize

TEMPLATE = Path(__file__).parents[1] / "checkpoints" / "tiny-libero-spatial"
DEFAULT_SIZE = TinySize()


def make_tiny_checkpoint(
    out: Path,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    num_images: int = 2,
    proprio: bool = True,
    l1_head: bool = False,
    size: TinySize = DEFAULT_SIZE,
) -> Path:
    """Write a checkpoint into the folder `out` and return `out`.

    The same arguments give the same weights. They are float32 by default, because small models run and train in float32
    on the CPU; those of the 7B checkpoints are bfloat16.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TEMPLATE / name, out / name)
    (entry,) = read_json(TEMPLATE / STATISTICS_FILE).values()  # the bundled policy's
    statistics = {f"libero_{suite}_no_noops": entry for suite in ("spatial", "object", "goal", "10")}
    write_json(out / STATISTICS_FILE, statistics)
    write_json(out / "preprocessor_config.json", _preprocessor_config(size.image_size))
    config = _config(size, num_images, statistics, str(dtype).removeprefix("torch."))
    write_json(out / "config.json", config)
    action_dim, proprio_dim = LIBERO_SIZES
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = OpenVLAOFT(read_network_config(out), num_action_tokens=CHUNK_LENGTH * action_dim)
        network.proprio_projector = ProprioProjector(proprio_dim, size.llm_dim) if proprio else None
        head = L1RegressionHead(2, size.llm_dim, size.llm_dim, action_dim) if l1_head else None
    token_ids = load_tokenizer(out).get_vocab().values()
    _initialise(network, token_ids, torch.Generator().manual_seed(seed))
    save_network(out, network, config, dtype=dtype, l1_head=head)
    return out


def _preprocessor_config(image_size: int) -> dict[str, object]:
    """preprocessor_config.json of a network whose images have `image_size` pixels a side."""
    square = [image_size, image_size]
    config = read_json(TEMPLATE / "preprocessor_config.json")
    config["input_sizes"] = [[3, *square]] * 2
    config["tvf_crop_params"] = [{"output_size": square}] * 2
    config["tvf_resize_params"] = [params | {"size": square} for params in config["tvf_resize_params"]]
    return config


def _config(size: TinySize, num_images: int, statistics: dict[str, object], dtype: str) -> dict[str, Any]:
    config = read_json(TEMPLATE / "config.json")
    config["num_images_in_input"] = num_images
    config["norm_stats"] = statistics
    config["looks"] = []  # random weights have learned from no pictures
    config["image_sizes"] = [size.image_size] * 2
    vit_sizes = {
        "patch_size": size.patch_size,
        "embed_dim": size.vision_dim,
        "depth": size.vision_depth,
        "num_heads": size.vision_heads,
    }
    config["test_vit_overrides"] = [vit_sizes] * 2
    config["torch_dtype"] = dtype
    config["text_config"] |= {
        "hidden_size": size.llm_dim,
        "intermediate_size": size.llm_mlp_dim,
        "num_hidden_layers": size.llm_depth,
        "num_attention_heads": size.llm_heads,
        "num_key_value_heads": size.llm_heads,
        "torch_dtype": dtype,
    }
    return config


@torch.no_grad()
def _initialise(network: OpenVLAOFT, token_ids: Iterable[int], generator: torch.Generator) -> None:
    """Draw weights with standard deviation 1 / sqrt(number of inputs).

    The libraries' 0.02 would make the outputs of such narrow layers nearly zero. LayerScale starts at 1, otherwise
    DINOv2 would start as the identity. Rows of token ids that occur in no text are zero, because zeros compress well.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            num_inputs = module.weight[0].numel()
            module.weight.copy_(num_inputs**-0.5 * torch.randn(module.weight.shape, generator=generator))
    for name, parameter in network.named_parameters():
        if name.endswith(".gamma"):  # a parameter of LayerScale
            parameter.fill_(1.0)
    embeddings = network.language_model.model.embed_tokens.weight
    lm_head = network.language_model.lm_head.weight
    embeddings.copy_(0.5 * torch.randn(embeddings.shape, generator=generator))
    unused = sorted(set(range(len(embeddings))) - set(token_ids))
    embeddings[unused] = 0.0
    lm_head[unused] = 0.0
