"""Time a checkpoint's decisions, and the preprocessing of camera frames, on one thread of a CPU.

    python -m benchmarks.decision [CHECKPOINT]

Prints medians of `repeats` calls, which follow two calls that are not counted.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # set before the imports below, because NumPy reads it when it is loaded

import tyro  # noqa: E402

from command_line import main_guard, parse_flags  # noqa: E402


@dataclass(frozen=True)
class Args:
    checkpoint: tyro.conf.Positional[str] = "checkpoints/tiny-libero-spatial"
    """Folder or hub id."""
    task_suite: str = "libero_spatial"
    repeats: int = 50


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.decision", description=__doc__)
    import torch

    from benchmarks.timing import make_observations, median_seconds
    from vla.loading import LoadOptions
    from vla.policy import Policy

    torch.set_num_threads(1)
    policy = Policy.load(args.checkpoint, LoadOptions(task_suite=args.task_suite, device="cpu"))
    (observation,) = make_observations(policy, 1, prepared=False)
    call_s = median_seconds(lambda: policy.act([observation]), args.repeats)
    preprocessing_s = median_seconds(
        lambda: policy.model_inputs.prepare_images(observation.images), args.repeats
    )
    print(f"one decision on {policy.num_images} image(s), one thread: {1e3 * call_s:.1f} ms")
    print(f"of it images: {1e3 * preprocessing_s:.1f} ms, {preprocessing_s / call_s:.0%}")


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.decision", main))
