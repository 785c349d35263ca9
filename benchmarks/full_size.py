"""Write a checkpoint of full size, 7.5 billion parameters in 15 GB, in the public format: random weights, or grown.

    python -m benchmarks.full_size OUT                               # random: for time and memory
    python -m benchmarks.full_size OUT --grow SMALL [--noise 0.02]   # decides as the small policy: also for learning

Neither has anything of OpenVLA-OFT's weights. Both show what this implementation does at full size: memory, speed,
and whether its optimizer learns. Both lack the outlier activations of trained networks, so they say nothing about
int8.

SMALL is a checkpoint folder of the true geometry, which `workshop.sft` trains in the sizes of SIZES_NEEDED: one or two
images, with or without robot state, without an L1 head. What it reads, the data set's statistics, tokenizer and looks
go over to OUT (benchmarks/growing.py says how the weights do).

The weights are made on a GPU. The same seed gives the same weights on the same kind of GPU.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmarks.growing import add_noise, grow, sizes_fit
from command_line import main_guard, parse_flags
from contracts import BadInput, read_json, unfinished_folder, write_json
from vla.checkpoint import inspect_checkpoint
from vla.heads import ProprioProjector
from vla.model import OpenVLAOFT
from vla.network_config import read_network_config
from vla.network_io import load_network, save_network
from workshop.sft_config import TinySize
from workshop.tiny import TEMPLATE, make_tiny_checkpoint

# Fields of the bundled policy's config.json that are those of a small policy. Where config.json says nothing, sizes are
# those of OpenVLA.
SMALL_FIELDS = ("looks", "norm_stats", "test_vit_overrides")
# Fields that are taken from the small policy.
COPIED_FIELDS = ("num_action_chunks", "norm_stats", "looks", "num_images_in_input")
NUM_ACTION_TOKENS = 56  # read only when a network runs: no weight depends on it
# Sizes of a small policy that can be grown to full size.
SMALL_SIZE = TinySize(image_size=224, patch_size=14, vision_dim=64, llm_dim=256, llm_heads=2)
SIZES_NEEDED = (
    "full size grows from a policy without an L1 head, of images of 224 pixels in patches of 14, "
    "vision width 32, 64 or 128, and language width 128, 256 or 512 in heads of 128; train one by "
    "`python -m workshop.sft --demos FOLDER --out SMALL --image-size 224 --patch-size 14 --vision-dim 64 "
    "--llm-dim 256 --llm-heads 2`"
)


@dataclass(frozen=True)
class Args:
    # Folder to write, 15 GB.
    out: tyro.conf.Positional[Path]
    # Folder of a small policy of the true geometry, whose decisions the network takes (None: random weights).
    grow: Path | None = None
    # Of a grown network: standard deviation of the noise on every weight, as a share of the root mean square of its
    # matrix's weights that are not zero. More noise makes the copies of a weight differ more, but costs success. From
    # 0.01 on, copies differ after rounding to bfloat16, whose steps are 0.4 to 0.8 % of a number.
    noise: float = 0.02
    # Seed of the random weights and of the noise.
    seed: int = 0


def full_size_config() -> dict[str, object]:
    """The config.json of a network of full size for two images."""
    config = read_json(TEMPLATE / "config.json")
    text_config = {
        "model_type": "llama",
        "pad_token_id": 32000,
        "vocab_size": 32064,
        "torch_dtype": "bfloat16",
    }
    sizes = {"num_images_in_input": 2, "image_sizes": [224, 224], "text_config": text_config}
    return {name: value for name, value in config.items() if name not in SMALL_FIELDS} | sizes


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.full_size", description=__doc__)
    if not torch.cuda.is_available():
        raise BadInput("weights of full size are made on a GPU with 20 GB free, but torch sees none")
    device = torch.device("cuda")
    with unfinished_folder(args.out) as folder, tempfile.TemporaryDirectory() as scratch:
        small = args.grow or make_tiny_checkpoint(Path(scratch), size=SMALL_SIZE)
        noise = None if args.grow is None else args.noise
        write_large(small, folder, full_size_config(), noise, args.seed, device)
    print(f"wrote {args.out}")


def write_large(
    small_folder: Path,
    folder: Path,
    target: dict[str, object],
    noise: float | None,
    seed: int,
    device: torch.device,
) -> None:
    """Write a checkpoint in the sizes of the config.json `target` that reads what a small policy reads.

    noise: of weights that are grown from the small policy's, see `add_noise`; None: they are random. They are computed
    in float32 and rounded to bfloat16. Raises BadInput when the small policy cannot be grown into these sizes.
    """
    info = inspect_checkpoint(small_folder)
    small = load_network(info, NUM_ACTION_TOKENS, device, torch.float32)
    large = build_on_meta(target)
    if info.action_head_file is not None or not sizes_fit(small, large):
        raise BadInput(f"{small_folder} cannot be grown: {SIZES_NEEDED}")
    large.to_empty(device=device)
    if small.proprio_projector is not None:  # in float32, as in public checkpoints
        sizes = (small.proprio_projector.proprio_dim, large.language_model.config.hidden_size)
        large.proprio_projector = ProprioProjector(*sizes).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    initialise(large, generator)
    if noise is not None:
        grow(small, large)
        add_noise(large, noise, generator)
    small_config = read_json(small_folder / "config.json") | {"num_images_in_input": info.num_images}
    config = target | {name: small_config[name] for name in COPIED_FIELDS if name in small_config}
    save_network(folder, large, config, source=small_folder)


def build_on_meta(config: dict[str, object]) -> OpenVLAOFT:
    """The network of a config.json in bfloat16, without memory and without a proprio projector."""
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", config)
        network_config = read_network_config(Path(folder))
    with torch.device("meta"):
        return OpenVLAOFT(network_config, NUM_ACTION_TOKENS).to(torch.bfloat16)


@torch.no_grad()
def initialise(network: OpenVLAOFT, generator: torch.Generator) -> None:
    """Scales 1, biases 0, all other weights random with standard deviation 1 / sqrt(inputs)."""
    for name, parameter in network.named_parameters():
        is_vector = parameter.ndim == 1
        is_norm_scale = is_vector and "norm" in name and name.endswith("weight")
        if name.endswith(".gamma") or is_norm_scale:
            parameter.fill_(1.0)
        elif is_vector:
            parameter.zero_()
        else:
            parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.full_size", main))
