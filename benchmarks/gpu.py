"""Print milliseconds and memory of the 7B network on one GPU: decisions and samples of updates.

    python -m benchmarks.gpu --folder FULL [--memory-gib 24] [--frozen-weights bf16 int8] [--trained-blocks all 16 8 4]

FULL: a 7B checkpoint, or random weights (`python -m benchmarks.full_size FULL`). The forward pass of an observation is
8.6 TFLOP with two images, which are 599 tokens, and 4.8 with one, 343 tokens. A sample of an update is twice that,
because the frozen weights get no gradient. MFU is the reached rate as a share of that of an 8192 x 8192 x 8192 matrix
product, measured in the same run. The memory of the allocator is limited, so what does not fit fails. Every kind of
update is measured with a new policy, so that no line includes the memory of passes that were recorded for another line.
With --trained-blocks K a sample's work is counted as K / 32 of that; it begins at the states that were kept.
"""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from command_line import main_guard, parse_flags
from contracts import GIB, BadInput, Observation
from vla.checkpoint import inspect_checkpoint
from vla.load_options import FrozenWeights, LoadOptions
from vla.policy import Policy
from vla.tokens import token_logprobs

TFLOP_FORWARD = {1: 4.8, 2: 8.6}  # of an observation with so many images, in the 7B network
PASSES_TO_DECIDE = 1  # the work of a decision, in forward passes
PASSES_TO_LEARN = 2  # the work of an update's sample, in forward passes
INSTRUCTION = "pick up the black bowl between the plate and the ramekin and place it on the plate"


@dataclass(frozen=True)
class Args:
    # A 7B checkpoint.
    folder: Path
    # Formats of the frozen weights that are measured, one after the other.
    frozen_weights: tuple[FrozenWeights, ...] = ("bf16",)
    # Values of --trained-blocks of train_grpo.py that are measured, one after the other.
    trained_blocks: tuple[int | Literal["all"], ...] = ("all",)
    # Limit of the GPU allocator, in GiB.
    memory_gib: float = 24.0
    # Calls of which the median is printed.
    repeats: int = 8
    # Observations decided together.
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    # Samples of an update's micro-batch. A compiled network computes one sample as two, so 1 shows the time of 2.
    micro_batches: tuple[int, ...] = (2, 4)


@dataclass(frozen=True)
class Meter:
    """Times calls and prints their lines."""

    ceiling: float  # TFLOP/s that count as 100 %
    tflop_forward: float  # of one observation
    repeats: int

    def report(self, name: str, num_rows: int, call: Callable[[], object], passes: float) -> None:
        """Time a call and print milliseconds for each of its `num_rows` rows, MFU and memory, or that it does not fit.

        passes: the work of a row, in forward passes.
        """
        torch.cuda.reset_peak_memory_stats()
        try:
            row_s = median_seconds(call, self.repeats) / num_rows
        except torch.OutOfMemoryError:
            print(f"{name:36} {num_rows:3}: does not fit", flush=True)
            return
        utilisation = passes * self.tflop_forward / row_s / self.ceiling
        peak_gib = torch.cuda.max_memory_allocated() / GIB
        reserved_gib = torch.cuda.max_memory_reserved() / GIB
        print(
            f"{name:36} {num_rows:3}: {1e3 * row_s:6.1f} ms each, {utilisation:4.0%} MFU, peak {peak_gib:5.2f} GiB "
            f"allocated, {reserved_gib:5.2f} reserved",
            flush=True,
        )


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.gpu", description=__doc__)
    if not torch.cuda.is_available():
        raise BadInput("torch sees no CUDA GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    num_images = inspect_checkpoint(args.folder).num_images
    meter = Meter(matrix_rate(), TFLOP_FORWARD[num_images], args.repeats)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; matrix product {meter.ceiling:.0f} TFLOP/s; "
        f"{num_images} image(s)",
        flush=True,
    )
    for weights in args.frozen_weights:
        for trained_blocks in args.trained_blocks:
            print(f"frozen weights: {weights}; trained blocks: {trained_blocks}", flush=True)
            options = LoadOptions(
                task_suite="libero_spatial",
                device="cuda",
                memory_budget=args.memory_gib,
                frozen_weights=weights,
                trained_blocks=None if trained_blocks == "all" else trained_blocks,
                compile="on",
            )
            measure_deciding(options, args, meter)
            measure_updates(options, args, meter)


def load(folder: Path, options: LoadOptions) -> Policy:
    """Free the memory of earlier policies, then load the policy; `options` limit the allocator."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return Policy.load(str(folder), options)


def measure_deciding(options: LoadOptions, args: Args, meter: Meter) -> None:
    """Measure loading and decisions.

    Every batch size is called once before the first one is timed, because calls right after compiling are slower.
    """
    started = time.perf_counter()
    policy = load(args.folder, options)
    allocated_gib = torch.cuda.memory_allocated() / GIB
    print(f"load {time.perf_counter() - started:.1f} s, {allocated_gib:.2f} GiB", flush=True)
    observations = make_observations(policy, max(args.batches))
    for batch in args.batches:
        started = time.perf_counter()
        policy.act(observations[:batch])
        print(f"first act of {batch}: {time.perf_counter() - started:.1f} s", flush=True)
    for batch in args.batches:
        meter.report("act", batch, partial(policy.act, observations[:batch]), PASSES_TO_DECIDE)
    with policy.teacher():
        meter.report("act, teacher", 1, partial(policy.act, observations[:1]), PASSES_TO_DECIDE)


def measure_updates(options: LoadOptions, args: Args, meter: Meter) -> None:
    """Measure forward and backward passes of every size of micro-batch, without and with recomputed activations.

    With a frozen trunk also from states in main memory, and the ratios of what acting and learning compute.
    """
    for recomputed in ("nothing", "all blocks"):
        for micro_batch_size in args.micro_batches:
            policy = load(args.folder, options)
            if recomputed == "all blocks":
                policy.network.recompute_everything()
            report_update(policy, f"update, recomputing {recomputed}", micro_batch_size, meter)
            if options.trained_blocks is not None and recomputed == "nothing":
                policy.kept_on = torch.device("cpu")
                report_update(policy, "update, states in main memory", micro_batch_size, meter)
            del policy  # the next one may need its memory


def report_update(policy: Policy, name: str, micro_batch_size: int, meter: Meter) -> None:
    observations = make_observations(policy, micro_batch_size)
    acted = policy.act(observations)
    states = [row.nbytes for row in acted.kept if row is not None]
    if states:
        print(f"kept states of a decision: {states[0] / 2**20:.2f} MiB on {policy.kept_on}", flush=True)

    def update() -> None:
        for _, parameter in policy.named_trainable_parameters():
            parameter.grad = None
        logits = policy.chunk_logits(observations, acted.kept)
        logprobs = token_logprobs(logits, acted.tokens, 1.0)
        logprobs.mean().backward()
        learned.append(logprobs.detach())

    learned: list[Tensor] = []
    network = policy.network
    share = 1.0
    if network.trained_blocks is not None:
        share = network.trained_blocks / len(network.language_model.model.layers)
    meter.report(name, micro_batch_size, update, PASSES_TO_LEARN * share)
    if learned:
        error = ((learned[-1].cpu() - acted.logprobs).exp() - 1).abs().mean()
        print(f"mean |ratio - 1| of learning beside acting: {error:.4f}", flush=True)


def make_observations(policy: Policy, count: int) -> list[Observation]:
    """Observations of noise, preprocessed as the simulators' processes do in a run."""
    generator = np.random.default_rng(0)
    frames = generator.integers(0, 256, (count, policy.num_images, 256, 256, 3), dtype=np.uint8)
    prepare = policy.model_inputs.prepare_images
    return [Observation(prepare(images), np.zeros(8), INSTRUCTION, True) for images in frames]


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of `repeats` calls, each until the GPU is idle again; two calls before are not counted."""
    durations = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        durations.append(time.perf_counter() - started)
    return median(durations[2:])


def matrix_rate() -> float:
    """TFLOP/s of a large bfloat16 product of random matrices."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / median_seconds(lambda: a @ b, 20) / 1e12


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.gpu", main))
