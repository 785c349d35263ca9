"""A replica of --data-parallel is killed in the middle of an update: when is that noticed, and does the program end?

    python -m benchmarks.killed_replica FOLDER [--seed 3] [--ask]                            # two GPUs
    python -m benchmarks.killed_replica checkpoints/tiny-libero-spatial --device cpu --memory-budget None

FOLDER: a checkpoint, or the random 7B one that `python -m benchmarks.full_size FOLDER` writes. The moment is drawn from
the seed. The program may already be waiting for the first device then, and with --ask it waits for it in any case: that
may take until SIGALRM ends it (`vla.replica_handle.end_in_any_case`); look at the exit code, and at the time.
"""

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro

from benchmarks.gpu_timing import prepared_observations
from benchmarks.program_update import acted_batch, updating
from vla.data_parallel import load_data_parallel

DECISIONS, MICRO_BATCH = 96, 2  # of the update; of each device in a pass


@dataclass(frozen=True)
class Args:
    checkpoint: tyro.conf.Positional[Path]
    device: Literal["cuda", "cpu"] = "cuda"
    memory_budget: float | None = 24.0
    """GiB of each GPU."""
    seed: int = 0
    ask: bool = False
    """Wait for the first device before the end, as train_grpo.py does not."""


def main(args: Args) -> None:
    on_gpus = args.device == "cuda"
    devices = [torch.device(args.device, i if on_gpus else None) for i in range(2)]
    policy = load_data_parallel(
        str(args.checkpoint),
        devices,
        memory_budget=args.memory_budget,
        task_suite="libero_spatial",
        dtype=torch.bfloat16 if on_gpus else torch.float32,
        compile_network=on_gpus,
    )
    batch = acted_batch(policy, prepared_observations(policy, DECISIONS))
    update = updating(policy, batch, len(devices) * MICRO_BATCH, MICRO_BATCH, lr=1e-6)
    update()  # compiles and records
    started = time.perf_counter()
    update()
    took = time.perf_counter() - started
    delay = random.Random(args.seed).uniform(0.05, 0.95) * took
    (handle,) = policy.replicas._handles
    threading.Timer(delay, partial(os.kill, handle.process.pid, signal.SIGKILL)).start()
    started = time.perf_counter()
    try:
        while True:
            update()
    except RuntimeError as error:
        noticed = time.perf_counter() - started - delay
        print(f"killed {delay:.2f} s into an update of {took:.2f} s; {noticed:.2f} s later: {error}", flush=True)
    if args.ask and on_gpus:
        torch.cuda.synchronize(devices[0])
        print("the first device answers", flush=True)
    print(f"the end begins at {time.strftime('%X')}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
