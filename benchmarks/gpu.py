"""Measure the 7B network on one GPU (decisions, updates, memory), and how a run scales if there are several GPUs.

    python -m benchmarks.gpu [--folder FOLDER] [--memory-gib 24] [--frozen-weights bf16 int8] [--no-iteration]

--folder holds a 7B checkpoint, or random weights of that size are written there (15 GB). The forward pass of an
observation is 8.6 TFLOP with two images, which are 599 tokens, and 4.8 with one, 343 tokens. A sample of an update is
twice that, because the frozen weights get no gradient. MFU is the reached rate as a share of that of an 8192 x 8192 x
8192 matrix product, measured in the same run. The memory of the allocator is limited, so what does not fit fails. Every
kind of update is measured with a new policy, so that no line includes the memory of passes that were recorded for
another line.
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_flags import Args
from command_line import handle_stop_signals, main_guard, parse_flags
from contracts import BadInput


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.gpu", description=__doc__)
    handle_stop_signals(signal.default_int_handler)  # so that the temporary folder is removed
    import torch

    if not torch.cuda.is_available():
        raise BadInput(
            "the 7B network is measured on a CUDA GPU, but torch sees none: check nvidia-smi and CUDA_VISIBLE_DEVICES; "
            "on a CPU `python -m benchmarks.decision` times a small policy"
        )
    from benchmarks.gpu_measures import measure

    if args.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), args)
    else:
        measure(args.folder, args)


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.gpu", main))
