"""Make a small checkpoint with random weights in the real folder format: for tests, and to train a small policy from.

Tokenizer, statistics and the fields of the configs that no size changes are those of the bundled policy.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from contracts import BadInput, first_line, read_json, write_json
from envs.tasks import METAWORLD
from vla.model import L1RegressionHead, OpenVLAOFT, ProprioProjector
from vla.model_config import read_model_config
from vla.network_io import save_checkpoint
from vla.prompts import load_tokenizer
from workshop.demo_files import CHUNK_LENGTH, LIBERO_SIZES, METAWORLD_SIZES

TEMPLATE = Path(__file__).parents[1] / "checkpoints" / "tiny-libero-spatial"


@dataclass(frozen=True)
class TinySize:
    """Sizes of the network. The default decides on two images in some 30 ms on one core."""

    image_size: int = 120
    """Side of the model's images in pixels."""
    patch_size: int = 20
    """Side of a patch in pixels: (image_size / patch_size)^2 tokens per image."""
    vision_dim: int = 96
    """Width of both vision transformers in numbers per token; a multiple of vision_heads."""
    vision_depth: int = 4
    """Blocks of both vision transformers; the last one is never computed, as in the 7B model."""
    vision_heads: int = 4
    """Attention heads of both vision transformers."""
    llm_dim: int = 128
    """Width of the language model in numbers per token. Its two vocabulary matrices have 32,064 rows of this width."""
    llm_depth: int = 4
    """Blocks of the language model; with one, action positions could not be told apart."""
    llm_heads: int = 4
    """Attention heads of the language model."""
    llm_mlp_dim: int = 344
    """Width of the language model's MLPs in numbers per token."""


def make_tiny_checkpoint(
    out: Path, dtype: torch.dtype = torch.float32, *, seed: int = 0, num_images: int = 2, proprio: bool = True,
    metaworld: bool = False, l1_head: bool = False, size: TinySize = TinySize(),
) -> Path:  # fmt: skip
    """Write the folder and return it. The same arguments give the same bytes.

    The weights are float32, unlike the 7B checkpoints' bfloat16: small models run and train so on the CPU.
    """
    side = [size.image_size] * 2
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TEMPLATE / name, out / name)
    (entry,) = read_json(TEMPLATE / "dataset_statistics.json").values()
    statistics = {f"libero_{suite}_no_noops": entry for suite in ("spatial", "object", "goal", "10")}
    if metaworld:
        unit = dict.fromkeys(("min", "q01"), [-1.0] * 4) | dict.fromkeys(("max", "q99"), [1.0] * 4)
        statistics = {METAWORLD: {"action": unit, "proprio": unit}}
    action_dim, proprio_dim = METAWORLD_SIZES if metaworld else LIBERO_SIZES
    write_json(out / "dataset_statistics.json", statistics)
    processor = read_json(TEMPLATE / "preprocessor_config.json")
    processor |= {"input_sizes": [[3, *side]] * 2, "tvf_crop_params": [{"output_size": side}] * 2}
    processor["tvf_resize_params"] = [params | {"size": side} for params in processor["tvf_resize_params"]]
    write_json(out / "preprocessor_config.json", processor)
    config = read_json(TEMPLATE / "config.json") | {
        "num_images_in_input": num_images,
        "norm_stats": statistics,
    }
    config["looks"] = []  # random weights
    vit = {"patch_size": size.patch_size, "embed_dim": size.vision_dim, "depth": size.vision_depth}
    config |= {"image_sizes": side, "test_vit_overrides": [vit | {"num_heads": size.vision_heads}] * 2}
    llm, heads = config["text_config"], size.llm_heads
    llm |= {
        "hidden_size": size.llm_dim,
        "intermediate_size": size.llm_mlp_dim,
        "num_hidden_layers": size.llm_depth,
    }
    llm |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    for part in (config, llm):
        part["torch_dtype"] = str(dtype).removeprefix("torch.")
    write_json(out / "config.json", config)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = OpenVLAOFT(read_model_config(out), num_action_tokens=CHUNK_LENGTH * action_dim)
            network.proprio_projector = ProprioProjector(proprio_dim, size.llm_dim) if proprio else None
            head = L1RegressionHead(2, size.llm_dim, size.llm_dim, action_dim) if l1_head else None
    except (ValueError, AssertionError, RuntimeError, ZeroDivisionError) as fault:
        raise BadInput(f"--size: no network can be built from {size} ({first_line(fault)})") from fault
    _initialise(network, load_tokenizer(out).get_vocab().values(), torch.Generator().manual_seed(seed))
    save_checkpoint(out, network, config, dtype=dtype, action_head=head)
    return out


@torch.no_grad()
def _initialise(network: OpenVLAOFT, token_ids: Iterable[int], generator: torch.Generator) -> None:
    """Weights with standard deviation 1 / sqrt(inputs): the libraries' 0.02 nearly silences layers of such small width.

    LayerScale starts at 1, or DINOv2 would start as the identity. Rows of ids that no text has are zero: they compress
    to nothing.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            std = module.weight[0].numel() ** -0.5
            module.weight.copy_(std * torch.randn(module.weight.shape, generator=generator))
    for name, parameter in network.named_parameters():
        if name.endswith(".gamma"):
            parameter.fill_(1.0)
    embeddings, lm_head = (
        network.language_model.model.embed_tokens.weight,
        network.language_model.lm_head.weight,
    )
    embeddings.copy_(0.5 * torch.randn(embeddings.shape, generator=generator))
    unused = sorted(set(range(len(embeddings))) - set(token_ids))
    embeddings[unused] = 0.0
    lm_head[unused] = 0.0
