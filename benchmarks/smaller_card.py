"""Run a command on a large GPU as if it were a smaller card, and print the peak of the whole GPU.

    python -m benchmarks.smaller_card 23.5 python train_grpo.py --task-id 0 --checkpoint FOLDER

This process holds a large tensor, the ballast, so that 23.5 GiB of every visible GPU are left free, as on a card of 24
GB. The command and its simulators share them. Their peak is how far the free memory falls, looked up 20 times a second.
So it counts weights, tensors, what torch's allocator keeps, CUDA contexts and the simulators' images, and also other
programs on the GPU. --memory-budget of the command is a different limit: that of the tensors of one process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.background import repeated_beside
from command_line import main_guard
from contracts import GIB, BadInput

if TYPE_CHECKING:  # imported where it is used: --help needs no torch
    from torch import Tensor

SAMPLING_INTERVAL_S = 0.05


class FreeMemory:
    """The free memory of a GPU, in bytes: at first, and the least since then."""

    def __init__(self, gpu_index: int) -> None:
        from torch.cuda import mem_get_info

        self.gpu_index = gpu_index
        self.mem_get_info = mem_get_info
        self.at_start, _ = mem_get_info(gpu_index)
        self.least = self.at_start

    def sample(self) -> None:
        unused, _ = self.mem_get_info(self.gpu_index)
        self.least = min(self.least, unused)

    def describe(self) -> str:
        peak_gib = (self.at_start - self.least) / GIB
        return (
            f"whole GPU {self.gpu_index}: peak {peak_gib:.2f} of the {self.at_start / GIB:.2f} GiB that the ballast "
            "left free"
        )


def take_ballast(gpu_index: int, free_gib: float) -> Tensor:
    """Allocate a uint8 tensor so large that `free_gib` GiB stay free. Raises BadInput if less is free already."""
    import torch

    device = torch.device("cuda", gpu_index)
    torch.zeros(1, device=device)  # create this process's CUDA context first, because it takes memory, too
    unused, _ = torch.cuda.mem_get_info(gpu_index)
    ballast_bytes = unused - int(free_gib * GIB)
    if ballast_bytes < 0:
        raise BadInput(
            f"{free_gib:g} GiB cannot be left free: {device} has only {unused / GIB:.1f} free; close other programs "
            "on it, or use a GPU with more memory"
        )
    return torch.empty(ballast_bytes, dtype=torch.uint8, device=device)


def main(argv: Sequence[str]) -> None:
    """Run the command, print the peaks, and raise SystemExit with the command's exit code."""
    parser = argparse.ArgumentParser(
        "benchmarks.smaller_card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("free_gib", type=float)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("a command is missing")
    import torch

    gpus = range(torch.cuda.device_count())
    if not gpus:
        raise BadInput(
            "no memory can be taken: torch sees no CUDA GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    ballast = [take_ballast(gpu_index, args.free_gib) for gpu_index in gpus]
    records = [FreeMemory(gpu_index) for gpu_index in gpus]

    def sample_all() -> None:
        for record in records:
            record.sample()

    with repeated_beside(sample_all, SAMPLING_INTERVAL_S):
        finished = subprocess.run(args.command)
    del ballast  # it was kept until here
    for record in records:
        print(record.describe(), flush=True)
    raise SystemExit(finished.returncode)


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.smaller_card", main))
