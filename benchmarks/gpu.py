"""The 7B network on one GPU: deciding, updating, memory; and, where there are several GPUs, how a run scales.

    python -m benchmarks.gpu [--folder FOLDER] [--memory-gib 24] [--frozen-weights bf16 int8] [--no-iteration]

Random weights at full size (written once to --folder, 15 GB), two images, 599 tokens. One forward pass of
an observation is 8.6 TFLOP, of an update's sample twice that: the frozen weights get no gradient. MFU is the share of
the rate of an 8192 x 8192 x 8192 product measured in the same run. The allocator is capped: what does not fit fails.
Every kind of update has a policy of its own, so no line counts memory of passes that another has recorded.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import tyro

from benchmarks import data_parallel
from benchmarks.full_size import write_full_size
from contracts import BadInput, Observation
from vla.loading import Compile, FrozenWeights, LoadOptions
from vla.memory import fit_to_memory
from vla.policy import Policy
from vla.tokens import FIRST_ACTION_TOKEN

GIB = 2**30
TFLOP_FORWARD = 8.6  # of one observation with two images, 599 tokens, in the 7B network
INSTRUCTION = "pick up the black bowl between the plate and the ramekin and place it on the plate"


@dataclass(frozen=True)
class Args:
    folder: Path | None = None
    """Where the checkpoint is, or is written."""
    frozen_weights: tuple[FrozenWeights, ...] = ("bf16",)
    """Formats of the frozen weights, one after the other."""
    memory_gib: float = 24.0
    """Limit of the GPU allocator."""
    repeats: int = 8
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Observations decided together."""
    micro_batches: tuple[int, ...] = (1, 2)
    budgets_gib: tuple[float, ...] = ()
    """Limits for which the plan of a run, its rate and its peak memory are shown, too (16 24 48 80)."""
    agreement: bool = False
    """Also set compiled passes beside plain ones in float32, which take 30 GB."""
    iteration: bool = True
    """Measure a whole iteration with simulators (`benchmarks.data_parallel`)."""


def main(args: Args) -> None:
    if args.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), args)
    else:
        measure(args.folder, args)


def measure(folder: Path, args: Args) -> None:
    ceiling = matrix_rate()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; matrix product {ceiling:.0f} TFLOP/s", flush=True)
    if not (folder / "config.json").exists():
        write_full_size(folder)
    for weights in args.frozen_weights:
        print(f"frozen weights: {weights}", flush=True)
        measure_deciding(folder, weights, args, ceiling)
        for everything in (False, True):
            for micro_batch_size in args.micro_batches:
                policy = load(folder, args.memory_gib, weights)
                if everything:
                    policy.recompute_everything()
                label = "all blocks" if everything else "nothing"
                report_update(policy, f"update, recomputing {label}", micro_batch_size, args, ceiling)
                del policy
        measure_optimizer(folder, weights, args)
        for gib in args.budgets_gib:
            measure_budget(folder, gib, weights, args, ceiling)
    if args.agreement:
        measure_agreement(folder, args.frozen_weights)
    free_memory()
    if args.iteration:
        data_parallel.main(data_parallel.Args(folder, memory_budget=args.memory_gib))


def load(folder: Path, memory_gib: float | None, weights: FrozenWeights, compile: Compile = "on") -> Policy:
    free_memory()
    torch.cuda.set_per_process_memory_fraction(1.0)
    options = LoadOptions(
        task_suite="libero_spatial",
        device="cuda",
        memory_budget=memory_gib,
        frozen_weights=weights,
        compile=compile,
    )
    return Policy.load(str(folder), options)


def measure_deciding(folder: Path, weights: FrozenWeights, args: Args, ceiling: float) -> None:
    """All sizes are met before the first is timed: right after compiling, times are not yet those of a long run."""
    started = time.perf_counter()
    policy = load(folder, args.memory_gib, weights)
    print(
        f"load {time.perf_counter() - started:.1f} s, {torch.cuda.memory_allocated() / GIB:.2f} GiB",
        flush=True,
    )
    seen = observations(policy, max(args.batches))
    for batch in args.batches:
        started = time.perf_counter()
        policy.act(seen[:batch])
        print(f"first act of {batch}: {time.perf_counter() - started:.1f} s", flush=True)
    for batch in args.batches:
        report("act", batch, lambda n=batch: policy.act(seen[:n]), args.repeats, ceiling, 1)
    with policy.teacher():
        report("act, teacher", 1, lambda: policy.act(seen[:1]), args.repeats, ceiling, 1)


def report_update(policy: Policy, name: str, micro_batch_size: int, args: Args, ceiling: float) -> None:
    seen = observations(policy, micro_batch_size)

    def update() -> None:
        for _, parameter in policy.named_trainable_parameters():
            parameter.grad = None
        learn_from(policy, seen)

    report(name, micro_batch_size, update, args.repeats, ceiling, 2)


def measure_optimizer(folder: Path, weights: FrozenWeights, args: Args) -> None:
    """A step of two samples: forward and backward pass, AdamW, the copies that the frozen products keep of adapters."""
    policy = load(folder, args.memory_gib, weights)
    seen = observations(policy, 2)
    optimizer = torch.optim.AdamW([p for _, p in policy.named_trainable_parameters()], lr=1e-15, fused=True)
    policy.watch(optimizer)

    def step() -> None:
        learn_from(policy, seen)
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    took = timed(step, args.repeats)
    print(f"optimizer step of 2 samples: {1e3 * took:.1f} ms, peak {peak():.2f} GiB", flush=True)


def measure_budget(folder: Path, gib: float, weights: FrozenWeights, args: Args, ceiling: float) -> None:
    """What a run with this --memory-budget would choose, and what that reaches under it."""
    for batch_size in (2, 32):
        policy = load(folder, gib, weights)
        try:
            micro_batch_size = fit_to_memory(policy, "auto", "auto", batch_size, 0)
        except BadInput as reason:
            print(f"--memory-budget {gib:g}, --batch-size {batch_size}: refused: {reason}", flush=True)
            del policy
            continue
        recomputed = dict(policy.describe())["recomputed"].split(" in ")[0]
        report_update(
            policy, f"{gib:g} GiB, batch {batch_size}, {recomputed}", micro_batch_size, args, ceiling
        )
        del policy


def measure_agreement(folder: Path, formats: Sequence[FrozenWeights], count: int = 16) -> None:
    """Greedy tokens of compiled passes and their log-probs, beside those of plain passes in float32."""
    decided = {}
    for weights in formats:
        policy = load(folder, None, weights)
        seen = observations(policy, count)
        acted = policy.act(seen)
        learned = torch.cat([policy.chunk_logits(seen[i : i + 2]).detach().cpu() for i in range(0, count, 2)])
        decided[weights] = acted, policy.token_logprobs(learned, acted.tokens, 1.0)
        del policy
    policy = load(folder, None, "float32", compile="off")
    with torch.no_grad():
        logits = torch.cat([policy.chunk_logits([one]) for one in seen]).cpu()
    for weights, (acted, learned) in decided.items():
        share = (acted.tokens == logits.argmax(-1) + FIRST_ACTION_TOKEN).float().mean()
        apart = acted.logprobs - policy.token_logprobs(logits, acted.tokens, 1.0)
        ratio = ((learned - acted.logprobs).exp() - 1).abs().mean()
        print(
            f"compiled {weights} beside float32: {share:.1%} of the greedy tokens equal; log-probs apart by "
            f"{apart.abs().mean():.4f} on average, {apart.abs().max():.4f} at most; learning beside acting: mean "
            f"|ratio - 1| of tokens {ratio:.4f}"
        )


def report(
    name: str, count: int, call: Callable[[], object], repeats: int, ceiling: float, passes: int
) -> None:
    """A line: milliseconds for each of the `count` rows of a call, MFU, memory. passes: forward passes' worth of work.

    ceiling: TFLOP/s that count as 100 %.
    """
    torch.cuda.reset_peak_memory_stats()
    try:
        milliseconds = 1e3 * timed(call, repeats) / count
    except torch.OutOfMemoryError:
        print(f"{name:36} {count:3}: does not fit", flush=True)
        return
    share = passes * TFLOP_FORWARD / (milliseconds / 1e3) / ceiling
    print(
        f"{name:36} {count:3}: {milliseconds:6.1f} ms each, {share:4.0%} MFU, peak {peak():5.2f} GiB allocated, "
        f"{torch.cuda.max_memory_reserved() / GIB:5.2f} reserved",
        flush=True,
    )


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call that ends with the GPU idle, after two calls that do not count."""
    durations = []
    for i in range(repeats + 2):
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i >= 2:
            durations.append(time.perf_counter() - started)
    return median(durations)


def peak() -> float:
    """Most memory in GiB that tensors have held since the last reset."""
    return torch.cuda.max_memory_allocated() / GIB


def matrix_rate() -> float:
    """TFLOP/s of a large bfloat16 product of random matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / timed(lambda: a @ b, 20) / 1e12


def free_memory() -> None:
    """Give back what Python and torch hold without need."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def observations(policy: Policy, count: int, prepared: bool = True) -> list[Observation]:
    """Noise, by default as the simulators' processes deliver it: preprocessing is not the policy's process's work."""
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (count, policy.num_images, 256, 256, 3), dtype=np.uint8)
    return [
        Observation(policy.prepare(images) if prepared else images, np.zeros(8), INSTRUCTION, prepared)
        for images in frames
    ]


def learn_from(policy: Policy, seen: Sequence[Observation]) -> None:
    """Forward and backward pass of a micro-batch; the gradient is added to what is there."""
    logits = policy.chunk_logits(seen)
    policy.token_logprobs(logits, logits.argmax(-1) + FIRST_ACTION_TOKEN, 1.0).mean().backward()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
