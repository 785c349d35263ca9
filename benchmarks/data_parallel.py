"""One device against two: time of deciding and of learning, and whether the devices stay equal.

    python -m benchmarks.data_parallel --checkpoint FOLDER                   # two GPUs
    python -m benchmarks.data_parallel --checkpoint checkpoints/tiny-libero-spatial --device cpu

FOLDER: a checkpoint, or the random 7B one that `python -m benchmarks.full_size FOLDER` writes. Both policies
are loaded side by side: the first GPU holds the weights twice (2 x 15 GB). Medians; every line does the same work per
device, so the ideal ratio is the number of devices.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro

from vla.data_parallel import load_data_parallel
from vla.observation import PlainObservation
from vla.policy import Policy
from vla.probes import synthetic_observations

OPTIMIZER_STEPS = 20


@dataclass(frozen=True)
class Args:
    checkpoint: Path
    """Folder of a checkpoint."""
    device: Literal["cuda", "cpu"] = "cuda"
    num_devices: int = 2
    """GPUs, or processes on the CPU."""
    act_batch: int = 8
    """Observations per device that are decided on together."""
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4)
    """Observations per device of an update's forward and backward pass."""
    gradient_checkpointing: bool = True
    repeats: int = 10


def main(args: Args) -> None:
    if args.device == "cpu":
        torch.set_num_threads(1)  # of each process
    devices = [torch.device(args.device, None if args.device == "cpu" else i) for i in range(args.num_devices)]
    one, all_devices = (load(args, devices[:count]) for count in (1, args.num_devices))
    observations = synthetic_observations(one, args.num_devices * max(args.act_batch, *args.micro_batch_sizes))

    print(f"{'':24}{'1 device':>12}{f'{args.num_devices} devices':>12}{'ratio':>8}")
    report(f"act on {args.act_batch} per device", args, one, all_devices, observations, args.act_batch, act)
    for size in args.micro_batch_sizes:
        name = f"update on {size} per device"
        report(name, args, one, all_devices, observations, size, UpdateStep(one, all_devices))

    step = UpdateStep(all_devices)
    for _ in range(OPTIMIZER_STEPS):
        step(all_devices, observations[: args.num_devices])
    print(f"after {OPTIMIZER_STEPS} more optimizer steps the devices are bit-equal: {all_devices.replicas.are_equal()}")


def load(args: Args, devices: Sequence[torch.device]) -> Policy:
    started = time.perf_counter()
    policy = load_data_parallel(
        str(args.checkpoint),
        devices,
        task_suite="libero_spatial",
        dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
        gradient_checkpointing=args.gradient_checkpointing,
    )
    print(f"loaded on {', '.join(map(str, devices))} in {time.perf_counter() - started:.1f} s")
    return policy


def act(policy: Policy, observations: Sequence[PlainObservation]) -> None:
    policy.act(observations)


class UpdateStep:
    """One optimizer step on one micro-batch: forward, backward, reduction, AdamW, broadcast."""

    def __init__(self, *policies: Policy):
        self._optimizers = {policy: torch.optim.AdamW(parameters_of(policy), lr=1e-6) for policy in policies}

    def __call__(self, policy: Policy, observations: Sequence[PlainObservation]) -> None:
        logits = policy.chunk_logits(observations)
        policy.token_logprobs(logits, logits.argmax(-1) + 31744, 1.0).mean().backward()
        policy.reduce_gradients()
        self._optimizers[policy].step()
        policy.broadcast_parameters()
        self._optimizers[policy].zero_grad(set_to_none=True)


def parameters_of(policy: Policy) -> list[torch.nn.Parameter]:
    return [parameter for _, parameter in policy.named_trainable_parameters()]


def report(
    name: str,
    args: Args,
    one: Policy,
    all_devices: Policy,
    observations: Sequence[PlainObservation],
    per_device: int,
    work: Callable[[Policy, Sequence[PlainObservation]], None],
) -> None:
    """A line of the table. The ratio is of observations per second."""
    alone = seconds(lambda: work(one, observations[:per_device]), one.device, args.repeats)
    together = seconds(
        lambda: work(all_devices, observations[: args.num_devices * per_device]), one.device, args.repeats
    )
    ratio = args.num_devices * alone / together
    print(f"{name:24}{1e3 * alone:9.0f} ms{1e3 * together:9.0f} ms{ratio:8.2f}")


def seconds(call: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median of a call that ends with the device idle, after two that do not count."""
    durations = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - started)
    return median(durations[2:])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
