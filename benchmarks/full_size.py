"""A checkpoint of full size, 7.5 billion parameters in 15 GB, in the public format: with random weights, or grown.

    python -m benchmarks.full_size OUT                               # random: for time and memory
    python -m benchmarks.full_size OUT --grow SMALL [--noise 0.02]   # decides as the small policy: also for learning

Neither has anything of OpenVLA-OFT's weights. Both show what this implementation does at full size: memory, speed,
precision, and whether its optimizer learns. A grown network also lacks the outlier activations of trained ones, so it
says nothing about formats of 8 bits.

SMALL is a checkpoint folder of the true geometry, which `workshop.sft` trains in the sizes of SIZES_NEEDED: one or two
images, with or without robot state, with or without an L1 head. What it reads, the data set's statistics, tokenizer and
looks go over to OUT (benchmarks/growing.py says how the weights do).

The weights are made on a GPU. The same seed gives the same weights on the same kind of GPU.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from command_line import main_guard, parse_flags
from configs.bounds import NOT_NEGATIVE, check_numbers
from contracts import BadInput


@dataclass(frozen=True)
class Args:
    """Write a checkpoint of full size: with random weights, or grown from a small policy."""

    out: tyro.conf.Positional[Path]
    """Folder to write, 15 GB."""
    grow: Path | None = None
    """Folder of a small policy of the true geometry, whose decisions the network takes (None: random weights)."""
    noise: Annotated[float, NOT_NEGATIVE] = 0.02
    """Of a grown network: standard deviation of the noise on every weight, as a share of the root mean square of its
    matrix's weights that are not zero. More noise makes the copies of a weight differ more, but costs success. 0.05
    cost none: 18 of 50 before, 17 and 20 after (two seeds). 0.36 weakened a policy (docs/LOG.md). From 0.01 on, copies
    differ after rounding to bfloat16, whose steps are 0.4 to 0.8 % of a number."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of the random weights and of the noise."""

    def __post_init__(self) -> None:
        check_numbers(self)


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.full_size")
    import torch

    from benchmarks.full_size_weights import CONFIG, write_full_size, write_grown

    if (args.out / "config.json").exists():
        raise BadInput(f"{args.out} holds a checkpoint already: name a new folder")
    if not torch.cuda.is_available():
        raise BadInput("weights of full size are made on a GPU with 20 GB free, but torch sees none")
    if args.grow is None:
        write_full_size(args.out, args.seed)
    else:
        write_grown(args.grow, args.out, CONFIG, args.noise, args.seed, torch.device("cuda"))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.full_size", main))
