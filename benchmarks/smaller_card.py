"""Run a command on a large GPU as if it were a smaller card, and print the peak of the whole GPU.

    python -m benchmarks.smaller_card 23.5 python train_grpo.py --task-id 0 --checkpoint FOLDER

This process holds a tensor that leaves 23.5 GiB of every visible GPU free, as a card of 24 GB has. The command and its
simulators share them. What they take together is what the free memory falls by, looked up 20 times a second: weights,
tensors, what torch's allocator keeps, CUDA contexts and the simulators' pictures. Other programs on the GPU would be
counted, too. --memory-budget of the command is another limit, of the tensors of one process.
"""

import argparse
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from command_line import main_guard
from contracts import BadInput

GIB = 2**30
SAMPLING_INTERVAL_S = 0.05


@dataclass
class FreeMemory:
    """Free bytes of a GPU: when the ballast had been taken, and the least since then."""

    gpu_index: int
    at_start: int
    least: int

    def sample(self) -> None:
        unused, _ = torch.cuda.mem_get_info(self.gpu_index)
        self.least = min(self.least, unused)

    def describe(self) -> str:
        peak_gib = (self.at_start - self.least) / GIB
        return (
            f"whole GPU {self.gpu_index}: peak {peak_gib:.2f} of the {self.at_start / GIB:.2f} GiB that the ballast "
            "left free"
        )


@contextmanager
def smaller_gpus(free_gib: float, num_gpus: int) -> Iterator[list[FreeMemory]]:
    """Leave `free_gib` GiB of each of the first GPUs free, and watch them. Raises BadInput where less is free."""
    ballast = [take_ballast(gpu_index, free_gib) for gpu_index in range(num_gpus)]
    records = []
    for gpu_index in range(num_gpus):
        unused, _ = torch.cuda.mem_get_info(gpu_index)
        records.append(FreeMemory(gpu_index, at_start=unused, least=unused))
    stop = threading.Event()
    watcher = threading.Thread(target=watch, args=(records, stop), daemon=True)
    watcher.start()
    try:
        yield records
    finally:
        stop.set()
        watcher.join()
        ballast.clear()
        torch.cuda.empty_cache()


def take_ballast(gpu_index: int, free_gib: float) -> Tensor:
    """A tensor of all but `free_gib` GiB of what is free. Raises BadInput where less is free."""
    device = torch.device("cuda", gpu_index)
    torch.zeros(1, device=device)  # creates this process's CUDA context, which takes memory itself
    unused, _ = torch.cuda.mem_get_info(gpu_index)
    ballast_bytes = unused - int(free_gib * GIB)
    if ballast_bytes < 0:
        raise BadInput(
            f"{free_gib:g} GiB cannot be left free: {device} has only {unused / GIB:.1f} free; close other programs "
            "on it, or use a GPU with more memory"
        )
    return torch.empty(ballast_bytes, dtype=torch.uint8, device=device)


def watch(records: list[FreeMemory], stop: threading.Event) -> None:
    while not stop.wait(SAMPLING_INTERVAL_S):
        for record in records:
            record.sample()


def main(argv: Sequence[str]) -> None:
    """Returns by SystemExit, with the command's exit code."""
    parser = argparse.ArgumentParser(
        "benchmarks.smaller_card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("free_gib", type=float)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("a command is missing")
    with smaller_gpus(args.free_gib, torch.cuda.device_count()) as records:
        finished = subprocess.run(args.command)
    for record in records:
        print(record.describe(), flush=True)
    raise SystemExit(finished.returncode)


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.smaller_card", main))
