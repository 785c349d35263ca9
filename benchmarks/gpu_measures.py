"""The measurements of `benchmarks.gpu`."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import data_parallel
from benchmarks.full_size_weights import write_full_size
from benchmarks.gpu_flags import Args
from benchmarks.timing import make_observations, median_seconds
from contracts import GIB, BadInput, Observation
from vla.checkpoint import inspect_checkpoint
from vla.loading import Compile, FrozenWeights, LoadOptions
from vla.memory import plan_update
from vla.policy import Policy
from vla.tokens import FIRST_ACTION_TOKEN

TFLOP_FORWARD = {1: 4.8, 2: 8.6}  # of an observation with so many images, in the 7B network
PASSES_TO_DECIDE = 1  # the work of a decision, in forward passes
PASSES_TO_LEARN = 2  # the work of an update's sample, in forward passes
AGREEMENT_OBSERVATIONS = 16


@dataclass(frozen=True)
class Meter:
    """Times calls and prints their lines."""

    ceiling: float  # TFLOP/s that count as 100 %
    tflop_forward: float  # of one observation
    repeats: int

    def report(self, name: str, num_rows: int, call: Callable[[], object], passes: int) -> None:
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
        reserved_gib = torch.cuda.max_memory_reserved() / GIB
        print(
            f"{name:36} {num_rows:3}: {1e3 * row_s:6.1f} ms each, {utilisation:4.0%} MFU, peak {peak_gib():5.2f} GiB "
            f"allocated, {reserved_gib:5.2f} reserved",
            flush=True,
        )


def measure(folder: Path, args: Args) -> None:
    if not (folder / "config.json").exists():
        write_full_size(folder)
    num_images = inspect_checkpoint(folder).num_images
    meter = Meter(matrix_rate(), TFLOP_FORWARD[num_images], args.repeats)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; matrix product {meter.ceiling:.0f} TFLOP/s; "
        f"{num_images} image(s)",
        flush=True,
    )
    for weights in args.frozen_weights:
        print(f"frozen weights: {weights}", flush=True)
        measure_deciding(folder, weights, args, meter)
        measure_updates(folder, weights, args, meter)
        measure_optimizer(folder, weights, args)
        for budget_gib in args.budgets_gib:
            measure_budget(folder, budget_gib, weights, meter)
    if args.agreement:
        measure_agreement(folder, args.frozen_weights)
    free_memory()
    if args.iteration:
        data_parallel.compare_ways(data_parallel.Args(folder, memory_budget=args.memory_gib))


def load(folder: Path, memory_gib: float | None, weights: FrozenWeights, compile: Compile = "on") -> Policy:
    """Free the memory of earlier policies, then load the policy; `memory_gib` limits the allocator (None: no limit)."""
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


def measure_deciding(folder: Path, weights: FrozenWeights, args: Args, meter: Meter) -> None:
    """Measure loading and decisions.

    Every batch size is called once before the first one is timed, because calls right after compiling are slower.
    """
    started = time.perf_counter()
    policy = load(folder, args.memory_gib, weights)
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


def measure_updates(folder: Path, weights: FrozenWeights, args: Args, meter: Meter) -> None:
    """Measure forward and backward passes of every size of micro-batch, without and with recomputed activations."""
    for recomputed in ("nothing", "all blocks"):
        for micro_batch_size in args.micro_batches:
            policy = load(folder, args.memory_gib, weights)
            if recomputed == "all blocks":
                policy.network.recompute_everything()
            report_update(policy, f"update, recomputing {recomputed}", micro_batch_size, meter)
            del policy  # the next one may need its memory


def report_update(policy: Policy, name: str, micro_batch_size: int, meter: Meter) -> None:
    observations = make_observations(policy, micro_batch_size)

    def update() -> None:
        for _, parameter in policy.named_trainable_parameters():
            parameter.grad = None
        learn_from(policy, observations)

    meter.report(name, micro_batch_size, update, PASSES_TO_LEARN)


def measure_optimizer(folder: Path, weights: FrozenWeights, args: Args) -> None:
    """Measure an optimizer step of two samples.

    It consists of forward and backward pass, AdamW, and the update of the copies of adapters that the matrix products
    with frozen weights keep.
    """
    policy = load(folder, args.memory_gib, weights)
    observations = make_observations(policy, 2)
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-15, fused=True)
    policy.watch(optimizer)

    def step() -> None:
        learn_from(policy, observations)
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    step_s = median_seconds(step, args.repeats)
    print(f"optimizer step of 2 samples: {1e3 * step_s:.1f} ms, peak {peak_gib():.2f} GiB", flush=True)


def measure_budget(folder: Path, budget_gib: float, weights: FrozenWeights, meter: Meter) -> None:
    """Print the plan that a run with this --memory-budget would choose, and measure its update under that limit."""
    for batch_size in (2, 32):
        policy = load(folder, budget_gib, weights)
        try:
            plan = plan_update(policy, "auto", "auto", batch_size)
        except BadInput as reason:
            print(f"--memory-budget {budget_gib:g}, --batch-size {batch_size}: refused: {reason}", flush=True)
        else:
            recomputed = dict(policy.describe())["recomputed"].split(" in ")[0]
            name = f"{budget_gib:g} GiB, batch {batch_size}, {recomputed}"
            report_update(policy, name, plan.micro_batch_size, meter)
        del policy  # the next one may need its memory


def measure_agreement(folder: Path, formats: Sequence[FrozenWeights]) -> None:
    """Compare greedy tokens and log-probs of compiled passes with those of plain passes in float32."""
    policy = load(folder, None, "float32", compile="off")
    observations = make_observations(policy, AGREEMENT_OBSERVATIONS)
    with torch.no_grad():
        exact = chunk_logits(policy, observations, 1)
    del policy  # the next one may need its memory
    for weights in formats:
        policy = load(folder, None, weights)
        acted = policy.act(observations)
        logits = chunk_logits(policy, observations, 2)
        learning = policy.token_logprobs(logits, acted.tokens, 1.0)
        share = (acted.tokens == exact.argmax(-1) + FIRST_ACTION_TOKEN).float().mean()
        differences = (acted.logprobs - policy.token_logprobs(exact, acted.tokens, 1.0)).abs()
        ratio_error = ((learning - acted.logprobs).exp() - 1).abs().mean()
        print(
            f"compiled {weights} beside float32: {share:.1%} of the greedy tokens equal; log-probs apart by "
            f"{differences.mean():.4f} on average, {differences.max():.4f} at most; learning beside acting: mean "
            f"|ratio - 1| of tokens {ratio_error:.4f}"
        )
        del policy


def chunk_logits(policy: Policy, observations: Sequence[Observation], micro_batch_size: int) -> Tensor:
    """Logits (N, A, 256) on the CPU, computed for `micro_batch_size` observations at a time."""
    parts = []
    for start in range(0, len(observations), micro_batch_size):
        logits = policy.chunk_logits(observations[start : start + micro_batch_size])
        parts.append(logits.detach().cpu())
    return torch.cat(parts)


def learn_from(policy: Policy, observations: Sequence[Observation]) -> None:
    """Forward and backward pass of a micro-batch; the gradient is added to the present one."""
    logits = policy.chunk_logits(observations)
    tokens = logits.argmax(-1) + FIRST_ACTION_TOKEN
    policy.token_logprobs(logits, tokens, 1.0).mean().backward()


def peak_gib() -> float:
    """The most memory that tensors have held since the last reset of the statistics."""
    return torch.cuda.max_memory_allocated() / GIB


def matrix_rate() -> float:
    """TFLOP/s of a large bfloat16 product of random matrices."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / median_seconds(lambda: a @ b, 20) / 1e12


def free_memory() -> None:
    """Free the memory that Python and torch hold without using it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
