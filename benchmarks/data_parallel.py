"""One device against several: time of deciding and of learning, their gradients, and whether the devices stay equal.

    python -m benchmarks.data_parallel FOLDER                                                  # all visible GPUs
    python -m benchmarks.data_parallel checkpoints/tiny-libero-spatial --device cpu --memory-budget None

FOLDER: a checkpoint, or the random 7B one that `python -m benchmarks.full_size FOLDER` writes. Medians; every line
does the same work per device, so the ideal ratio is the number of devices. A GPU may have --memory-budget GiB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro

from benchmarks.gpu_timing import free_memory, prepared_observations, timed, trainable
from benchmarks.program_update import acted_batch, seconds_of_a_step, updating
from contracts import Observation
from vla.data_parallel import load_data_parallel
from vla.policy import Policy

MICRO_BATCHES = 24  # of each device, in an update


@dataclass(frozen=True)
class Args:
    checkpoint: tyro.conf.Positional[Path]
    device: Literal["cuda", "cpu"] = "cuda"
    num_devices: int | None = None
    """GPUs (default: all that are visible), or processes on the CPU (default: 2)."""
    memory_budget: float | None = 24.0
    """GiB of each GPU."""
    batches: tuple[int, ...] = (1, 8, 16)
    """Observations per device that are decided on together."""
    micro_batch_size: int = 2
    """Observations per device of a forward and backward pass."""
    accumulate: tuple[int, ...] = (1, 8)
    """Forward and backward passes of an optimizer step."""
    repeats: int = 10
    update_repeats: int = 3


def main(args: Args) -> None:
    if args.device == "cpu":
        torch.set_num_threads(1)  # of each process
    count = args.num_devices or (2 if args.device == "cpu" else torch.cuda.device_count())
    devices = [torch.device(args.device, None if args.device == "cpu" else i) for i in range(count)]
    alone, gradient = measure(args, devices[:1], count)
    together, gradient_together = measure(args, devices, count)
    print(f"{'':48}{'1 device':>12}{f'{count} devices':>12}{'ratio of rates':>16}")
    for work, seconds in alone.items():
        ratio = count * seconds / together[work]
        print(f"{work:48}{1e3 * seconds:9.1f} ms{1e3 * together[work]:9.1f} ms{ratio:16.2f}")
    apart = (gradient_together - gradient).norm() / gradient.norm()
    print(f"gradients of the same samples are apart by {apart:.1e} of their norm")


def measure(args: Args, devices: Sequence[torch.device], count: int) -> tuple[dict[str, float], torch.Tensor]:
    """Seconds of each kind of work, and a gradient (N,), that of one micro-batch on each of `count` devices."""
    policy = load_data_parallel(
        str(args.checkpoint),
        devices,
        memory_budget=args.memory_budget,
        task_suite="libero_spatial",
        dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
        compile_network=args.device == "cuda",
    )
    micro = args.micro_batch_size
    observations = prepared_observations(policy, len(devices) * max(*args.batches, MICRO_BATCHES * micro))
    seconds: dict[str, float] = {}

    def keep(work: str, took: float) -> None:
        seconds[work] = took
        print(f"{len(devices)} x {work}: {1e3 * took:.1f} ms", flush=True)

    for batch_size in args.batches:
        rows = observations[: len(devices) * batch_size]
        keep(f"act on {batch_size} per device", timed(partial(policy.act, rows), args.repeats))
    batch = acted_batch(policy, observations[: len(devices) * MICRO_BATCHES * micro])
    for passes in args.accumulate:
        name = f"optimizer step of {passes} x {micro} samples per device"
        keep(name, seconds_of_a_step(policy, batch, passes * len(devices) * micro, micro, args.update_repeats))
    if len(devices) > 1:
        updating(policy, batch, len(devices) * micro, micro, lr=1e-6)()
        equal = policy.replicas.are_equal()
        print(f"after {MICRO_BATCHES} more optimizer steps the devices are {'' if equal else 'NOT '}bit-equal")
    gradient = gradient_of(policy, observations[: count * micro], micro)
    if len(devices) > 1:
        policy.replicas.close()
    del policy
    free_memory()
    return seconds, gradient


def gradient_of(policy: Policy, observations: Sequence[Observation], micro_batch_size: int) -> torch.Tensor:
    """(N,), on the CPU, of the log-probability of one token, with adapters that are not zero."""
    parameters = trainable(policy)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))
    policy.parameters_changed()
    at_once = len(policy.devices) * micro_batch_size
    for start in range(0, len(observations), at_once):
        policy.chunk_logits(observations[start : start + at_once]).log_softmax(-1)[..., 7].sum().backward()
    policy.reduce_gradients()
    return torch.cat([parameter.grad.flatten().cpu() for parameter in parameters if parameter.grad is not None])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
