"""Make a small checkpoint with random weights in the real folder format: for tests, and to train a small policy from.

python -m vla.tiny --out FOLDER [--num-images 1] [--no-proprio] [--seed 1] [--size.llm-dim 64]
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from command_line import answer_at_once, main_guard, parse_flags
from vla.settings import TinyArgs, TinySize

parse = partial(parse_flags, TinyArgs, prog="python -m vla.tiny")

if __name__ == "__main__":
    answer_at_once("vla.tiny", parse)  # before the seconds that the imports below take

import torch
from torch import nn

from contracts import write_json
from vla.checkpoint import read_model_config, save_checkpoint
from vla.model import L1RegressionHead, OpenVLAOFT, ProprioProjector
from vla.tiny_tokenizer import vocabulary, write_tokenizer

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")


def make_tiny_checkpoint(
    out: Path,
    seed: int = 0,
    num_images: int = 2,
    proprio: bool = True,
    l1_head: bool = False,
    size: TinySize | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the folder and return it. The same arguments give the same bytes.

    The weights are float32, unlike the 7B checkpoints' bfloat16: small models run and train in float32 on the CPU, and
    so what was trained is what is saved.
    """
    size = size or TinySize()
    out.mkdir(parents=True, exist_ok=True)
    statistics = {f"{suite}_no_noops": _statistics() for suite in SUITES}
    config = _config(size, num_images, dtype) | {"norm_stats": statistics}
    write_json(out / "config.json", config)
    write_json(out / "dataset_statistics.json", statistics)
    write_json(out / "preprocessor_config.json", _preprocessor_config(size.image_size))
    write_tokenizer(out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = OpenVLAOFT(read_model_config(out), num_action_tokens=8 * 7)
        network.proprio_projector = ProprioProjector(8, size.llm_dim) if proprio else None
        head = L1RegressionHead(2, size.llm_dim, size.llm_dim, 7) if l1_head else None
    _initialise(network, torch.Generator().manual_seed(seed))
    save_checkpoint(out, network, config, dtype=dtype, action_head=head)
    return out


@torch.no_grad()
def _initialise(network: OpenVLAOFT, generator: torch.Generator) -> None:
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
    llama = network.language_model
    embeddings = llama.model.embed_tokens.weight
    embeddings.copy_(0.5 * torch.randn(embeddings.shape, generator=generator))
    unused = torch.ones(len(embeddings), dtype=torch.bool)
    unused[sorted(vocabulary().values())] = False
    embeddings[unused] = 0.0
    llama.lm_head.weight[unused] = 0.0


def _config(size: TinySize, num_images: int, dtype: torch.dtype) -> dict[str, Any]:
    dtype_name = str(dtype).removeprefix("torch.")
    vit = {"patch_size": size.patch_size, "embed_dim": size.vision_dim, "depth": size.vision_depth}
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [size.image_size] * 2,
        "llm_backbone_id": "llama2-7b-pure",
        "llm_max_length": 2048,
        "n_action_bins": 256,
        "num_images_in_input": num_images,
        "output_projector_states": False,
        "pad_to_multiple_of": 64,
        "pad_token_id": 32000,
        "test_vit_overrides": [vit | {"num_heads": size.vision_heads}, vit | {"num_heads": size.vision_heads}],
        "text_config": {
            "model_type": "llama",
            "hidden_size": size.llm_dim,
            "intermediate_size": size.llm_mlp_dim,
            "num_hidden_layers": size.llm_depth,
            "num_attention_heads": size.llm_heads,
            "num_key_value_heads": size.llm_heads,
            "pad_token_id": 32000,
            "torch_dtype": dtype_name,
            "vocab_size": 32064,
        },
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_override_act_layers": [None, None],
        "torch_dtype": dtype_name,
        "transformers_version": "4.40.1",
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
    }


def _preprocessor_config(image_size: int) -> dict[str, Any]:
    """As published, with the constants rounded to bfloat16 that the published models were trained with."""
    side = [image_size, image_size]
    resize = {"antialias": True, "interpolation": 3, "max_size": None, "size": side}
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, *side]] * 2,
        "interpolations": ["bicubic"] * 2,
        "means": [[0.485, 0.456, 0.406], [0.5] * 3],
        "stds": [[0.229, 0.224, 0.225], [0.5] * 3],
        "tvf_crop_params": [{"output_size": side}] * 2,
        "tvf_do_letterbox": False,
        "tvf_letterbox_fill": None,
        "tvf_normalize_params": [
            {
                "inplace": False,
                "mean": [0.484375, 0.455078125, 0.40625],
                "std": [0.228515625, 0.2236328125, 0.224609375],
            },
            {"inplace": False, "mean": [0.5] * 3, "std": [0.5] * 3},
        ],
        "tvf_resize_params": [resize] * 2,
        "use_fused_vision_backbone": True,
    }


def _statistics() -> dict[str, Any]:
    """Plausible ranges of LIBERO demonstrations: end-effector displacement, rotation and gripper; state of the arm."""
    action_high = [0.9, 0.85, 0.93, 0.11, 0.18, 0.16, 1.0]
    action_low = [-0.75, -0.84, -0.93, -0.11, -0.2, -0.19, 0.0]
    proprio_high = [0.14, 0.34, 1.26, 3.6, 0.2, 0.6, 0.04, 0.0]
    proprio_low = [-0.2, -0.3, 0.9, 2.4, -1.1, -0.6, 0.0, -0.04]
    return {
        "action": _vector_statistics(action_low, action_high) | {"mask": [True] * 6 + [False]},
        "proprio": _vector_statistics(proprio_low, proprio_high),
        "num_transitions": 50_000,
        "num_trajectories": 430,
    }


def _vector_statistics(low: list[float], high: list[float]) -> dict[str, list[float]]:
    pairs = list(zip(low, high, strict=True))
    return {
        "q01": low,
        "q99": high,
        "min": [1.05 * value for value in low],
        "max": [1.05 * value for value in high],
        "mean": [(a + b) / 2 for a, b in pairs],
        "std": [(b - a) / 4 for a, b in pairs],
    }


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    make_tiny_checkpoint(args.out, args.seed, args.num_images, args.proprio, args.l1_head, args.size)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    sys.exit(main_guard("vla.tiny", main))
