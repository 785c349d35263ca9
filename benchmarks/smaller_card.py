"""Run a command on a large GPU as if it were a smaller card, and print the peak of the whole GPU.

    python -m benchmarks.smaller_card 23.5 python train_grpo.py --task-id 0 --checkpoint FOLDER

This process holds a large tensor, the ballast, so that 23.5 GiB of every visible GPU are left free, as on a card of 24
GB. The command and its simulators share them. Their peak is how far the free memory falls, looked up 20 times a second.
So it counts weights, tensors, what torch's allocator keeps, CUDA contexts and the simulators' images, and also other
programs on the GPU. --memory-budget of the command is a different limit: that of the tensors of one process.
"""

import subprocess
import sys
from collections.abc import Sequence

import torch

from command_line import main_guard
from contracts import GIB, BadInput

SAMPLING_INTERVAL_S = 0.05
USAGE = "usage: python -m benchmarks.smaller_card GIB COMMAND ..."


def take_ballast(gpu_index: int, free_gib: float) -> torch.Tensor:
    """Allocate a uint8 tensor so large that `free_gib` GiB stay free. Raises BadInput if less is free already."""
    device = torch.device("cuda", gpu_index)
    torch.zeros(1, device=device)  # create this process's CUDA context first, because it takes memory, too
    unused, _ = torch.cuda.mem_get_info(gpu_index)
    ballast_bytes = unused - int(free_gib * GIB)
    if ballast_bytes < 0:
        raise BadInput(f"cuda:{gpu_index} has only {unused / GIB:.1f} GiB free, not {free_gib:g}")
    return torch.empty(ballast_bytes, dtype=torch.uint8, device=device)


def run_watched(command: Sequence[str], gpus: Sequence[int]) -> tuple[int, dict[int, float]]:
    """Run the command; returns its exit code, and how far the free memory of each GPU fell, in GiB."""
    at_start = {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in gpus}
    least = dict(at_start)
    process = subprocess.Popen(command)
    exit_code = None
    while exit_code is None:
        for gpu in gpus:
            least[gpu] = min(least[gpu], torch.cuda.mem_get_info(gpu)[0])
        try:
            exit_code = process.wait(SAMPLING_INTERVAL_S)
        except subprocess.TimeoutExpired:
            continue
    return exit_code, {gpu: (at_start[gpu] - least[gpu]) / GIB for gpu in gpus}


def main(argv: Sequence[str]) -> None:
    """Raises SystemExit with the command's exit code."""
    if len(argv) < 2:
        raise BadInput(USAGE)
    try:
        free_gib = float(argv[0])
    except ValueError:
        raise BadInput(USAGE) from None
    gpus = range(torch.cuda.device_count())
    if not gpus:
        raise BadInput("torch sees no CUDA GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    ballast = [take_ballast(gpu, free_gib) for gpu in gpus]
    exit_code, peaks_gib = run_watched(argv[1:], gpus)
    del ballast  # it was kept until here
    for gpu, peak_gib in peaks_gib.items():
        print(f"whole GPU {gpu}: peak {peak_gib:.2f} of the {free_gib:g} GiB that were left free")
    raise SystemExit(exit_code)


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.smaller_card", main))
