"""Seconds per decision of a checkpoint on this machine, and how they are shared between preprocessing and network.

    python -m benchmarks.decision --checkpoint FOLDER_OR_HUB_ID [--task-suite libero_spatial] [--device cuda]

Median of `repeats` decisions after three that are not counted; one thread, as in a run with one process per core.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import tyro

from contracts import Observation
from vla.policy import Policy


@dataclass(frozen=True)
class Args:
    checkpoint: str
    """Folder or hub id."""
    task_suite: str = "libero_spatial"
    device: str = "cpu"
    repeats: int = 20
    batch: int = 1
    """Observations per call."""
    threads: int = 1


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    policy = Policy.load(args.checkpoint, task_suite=args.task_suite, device=device, dtype=dtype)
    for name, value in policy.describe():
        print(f"{name:>16}  {value}")

    random = np.random.default_rng(0)
    proprio_dim = 0 if policy.statistics.proprio is None else policy.statistics.proprio.dim
    observations = [
        Observation(
            random.integers(0, 256, (policy.num_images, 256, 256, 3), dtype=np.uint8),
            np.zeros(proprio_dim),
            "pick up the black bowl and place it on the plate",
        )
        for _ in range(args.batch)
    ]
    whole = seconds(lambda: policy.act(observations), args.repeats, device)
    preprocessing = seconds(lambda: policy.model_inputs(observations), args.repeats, device)
    with policy.teacher():
        teacher = seconds(lambda: policy.act(observations), args.repeats, device)
    print(f"{'one call':>16}  {1e3 * whole:.1f} ms for {args.batch} observations")
    print(f"{'preprocessing':>16}  {1e3 * preprocessing:.1f} ms, {preprocessing / whole:.0%}")
    print(f"{'adapters off':>16}  {1e3 * teacher:.1f} ms, {teacher / whole:.0%}")


def seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median wall time of `call`, the device's queue included."""
    times = []
    for _ in range(3 + repeats):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[3:])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
