"""The 7B network on one GPU, ours beside the plain one in the same run: deciding, updating, memory, an iteration.

    python -m benchmarks.gpu [--folder FOLDER] [--memory-gib 24]

Random weights at full size (written once to --folder, 15 GB), two images, bfloat16, 599 tokens. One forward pass of
an observation is 8.6 TFLOP, of an update's sample twice that: the frozen weights get no gradient. MFU is the share of
the rate of an 8192 x 8192 x 8192 product measured in the same run. The allocator is capped: what does not fit fails.
The last part runs `benchmarks/iteration.py`, which needs the simulator; on several GPUs it and
`benchmarks/data_parallel.py` measure how they scale.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmarks import data_parallel, iteration
from benchmarks.agreement import describe_agreement
from benchmarks.full_size import write_full_size
from benchmarks.gpu_timing import (
    GIB,
    forget_recordings,
    free_memory,
    learn_from,
    matrix_rate,
    peak,
    prepared_observations,
    report,
    trainable,
)
from benchmarks.plain import make_plain, plain_logits
from benchmarks.program_update import acted_batch, seconds_of_a_step
from errors import BadInput
from vla.checkpoint import inspect_checkpoint, load_network
from vla.lora import refresh_adapters
from vla.memory import choose_plan, free_for_activations, limit_memory, measure_needs
from vla.model import llama_block, vit_block
from vla.policy import Policy
from vla.probes import synthetic_observations
from vla.tokens import FIRST_ACTION_TOKEN


@dataclass(frozen=True)
class Args:
    folder: Path | None = None
    """Where the checkpoint is, or is written."""
    memory_gib: float = 24.0
    """Limit of the GPU allocator."""
    repeats: int = 8
    plain: bool = True
    """Measure the plain implementation, too."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Observations decided together."""
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    budgets_gib: tuple[float, ...] = (16, 24, 48, 80)
    """Limits for which plan, rates and peak memory are shown."""
    iteration: bool = True
    """Measure a whole iteration with simulators and, if there are several GPUs, how all scales."""


def main(args: Args) -> None:
    if args.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), args)
    else:
        measure(args.folder, args)


def measure(folder: Path, args: Args) -> None:
    ceiling = matrix_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; matrix product {ceiling:.0f} TFLOP/s", flush=True
    )
    if not (folder / "config.json").exists():
        write_full_size(folder)
    free_memory()
    limit_memory(args.memory_gib, torch.device("cuda"))
    if args.plain:
        measure_plain(folder, args, ceiling)
        free_memory()
    measure_ours(folder, args, ceiling)
    free_memory()
    if args.iteration:
        if torch.cuda.device_count() > 1:
            data_parallel.main(data_parallel.Args(folder))
        iteration.main(iteration.Args(folder))


def measure_ours(folder: Path, args: Args, ceiling: float) -> None:
    started = time.perf_counter()
    policy = Policy.load(
        str(folder), task_suite="libero_spatial", device="cuda", dtype=torch.bfloat16, compile_network=True
    )
    print(f"load {time.perf_counter() - started:.1f} s, {torch.cuda.memory_allocated() / GIB:.2f} GiB", flush=True)
    measure_deciding(policy, args, ceiling)
    measure_updating(policy, args, ceiling)
    measure_optimizer(policy)
    measure_budgets(policy, args, ceiling)
    measure_agreement(policy)


def measure_plain(folder: Path, args: Args, ceiling: float) -> None:
    inputs_of = Policy.load(str(folder), task_suite="libero_spatial", device="cuda", dtype=torch.bfloat16)
    inputs = inputs_of.model_inputs(synthetic_observations(inputs_of, max(args.batches)))
    del inputs_of
    free_memory()
    network = make_plain(load_network(inspect_checkpoint(folder, 2), 56, torch.device("cuda"), torch.bfloat16))

    def rows(count: int) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if x is None else x[:count] for x in inputs)

    with torch.no_grad():
        for batch in (1, 8):
            report("plain act", batch, lambda n=batch: plain_logits(network, rows(n), False), args.repeats, ceiling, 1)
    for checkpointing, micro in ((True, 1), (True, 2), (False, 1), (False, 2)):
        name = f"plain update{', recomputing' if checkpointing else ''}"

        def update(n: int = micro, c: bool = checkpointing) -> None:
            network.zero_grad(set_to_none=True)
            plain_logits(network, rows(n), c).log_softmax(-1).mean().backward()

        report(name, micro, update, args.repeats, ceiling, 2)


def measure_deciding(policy: Policy, args: Args, ceiling: float) -> None:
    """All sizes are met before the first is timed: right after compiling, times are not yet those of a long run."""
    observations = prepared_observations(policy, max(args.batches))
    for batch in args.batches:
        started = time.perf_counter()
        policy.act(observations[:batch])
        print(f"first act of {batch}: {time.perf_counter() - started:.1f} s", flush=True)
    for batch in args.batches:
        report("act", batch, lambda n=batch: policy.act(observations[:n]), args.repeats, ceiling, 1)
    with policy.teacher():
        report("act, teacher", 1, lambda: policy.act(observations[:1]), args.repeats, ceiling, 1)


def measure_updating(policy: Policy, args: Args, ceiling: float) -> None:
    for recomputed, label in ((0, "nothing"), (policy.network.num_blocks, "all blocks")):
        for micro in args.micro_batches:
            measure_update(policy, f"update, recomputing {label}", recomputed, micro, args, ceiling)


def measure_update(policy: Policy, name: str, recomputed: int, micro: int, args: Args, ceiling: float) -> None:
    """A line on passes with a choice of their own of what is recomputed: nothing recorded before takes part."""
    forget_recordings(policy)
    policy.network.recompute(recomputed)
    observations = prepared_observations(policy, micro)

    def update() -> None:
        for parameter in trainable(policy):
            parameter.grad = None
        learn_from(policy, observations)

    report(name, micro, update, args.repeats, ceiling, 2)


def measure_optimizer(policy: Policy) -> None:
    forget_recordings(policy)
    policy.network.recompute(0)
    batch = acted_batch(policy, prepared_observations(policy, 32))
    torch.cuda.reset_peak_memory_stats()
    took = seconds_of_a_step(policy, batch, batch_size=2, micro_batch_size=2, repeats=3)
    print(f"optimizer step of 2 samples, everything: {1e3 * took:.1f} ms, peak {peak():.2f} GiB", flush=True)


def measure_budgets(policy: Policy, args: Args, ceiling: float) -> None:
    """For each limit what a run with it would choose, and what that reaches under it."""
    limit_memory(torch.cuda.get_device_properties(0).total_memory / GIB, policy.device)
    needs = measure_needs(policy, synthetic_observations(policy, 1)[0])
    listed = ", ".join(f"{need.bytes / GIB:.2f} GiB with {need.recomputed_blocks} blocks recomputed" for need in needs)
    print(f"a sample's passes take {listed}")
    for gib in args.budgets_gib:
        forget_recordings(policy)
        limit_memory(gib, policy.device)
        for batch in (2, 32):
            try:
                plan = choose_plan(needs, free_for_activations(policy), batch)
            except BadInput as reason:
                print(f"--memory-budget {gib:g}, --batch-size {batch}: refused: {reason}", flush=True)
                continue
            name = f"{gib:g} GiB, batch {batch}, {plan.recomputed_blocks} recomputed"
            measure_update(policy, name, plan.recomputed_blocks, plan.micro_batch_size, args, ceiling)
    limit_memory(args.memory_gib, policy.device)
    forget_recordings(policy)


def measure_agreement(policy: Policy, count: int = 16) -> None:
    """Compiled and recorded passes, and plain ones, against float32, on adapters that are not zero. Lifts the cap."""
    observations = prepared_observations(policy, count)
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_trainable_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator, device="cuda"))
    policy.network.recompute(0)
    acted = {"compiled, in a batch": [policy.act(observations)]}
    acted["compiled, alone"] = [policy.act([observation]) for observation in observations]
    policy._forward = policy.network
    policy.network._vit_block, policy.network._llama_block = vit_block, llama_block
    acted["eager, in a batch"] = [policy.act(observations)]
    torch.cuda.set_per_process_memory_fraction(1.0)
    policy.network.float()
    refresh_adapters(policy.network, force=True)
    with torch.no_grad():
        logits = torch.cat([policy.chunk_logits([observation]) for observation in observations]).cpu()
    greedy = logits.argmax(-1) + FIRST_ACTION_TOKEN
    for name, parts in acted.items():
        tokens, logprobs = (torch.cat([getattr(part, f) for part in parts]) for f in ("tokens", "logprobs"))
        agreement = describe_agreement(logprobs, policy.token_logprobs(logits, tokens, 1.0))
        share = (tokens == greedy).float().mean()
        print(f"{name}: {share:.1%} of the greedy tokens are float32's; {agreement}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
