"""The policy with its base in 4 bits beside the same in bfloat16, in one run: memory, speed, and what rounding changes.

    python -m benchmarks.nf4 FOLDER [--memory-gib 12]

Both have the same adapters, random and not zero. The 4-bit policy comes first, with the allocator capped at
--memory-gib from its loading on: what does not fit fails. Then bfloat16 has the whole GPU. Agreement is on synthetic
observations: the share of equal greedy tokens, and how far the log-probabilities of bfloat16's greedy tokens are apart.
How sure of its tokens bfloat16 is says what that means: nearly flat logits, as of random weights, are easily turned
over. On a CPU it runs in float32, without cap and memory: a test of itself.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro
from torch import Tensor

from benchmarks.agreement import describe_agreement
from benchmarks.gpu_timing import (
    GIB,
    forget_recordings,
    free_memory,
    learn_from,
    peak,
    prepared_observations,
    timed,
    trainable,
)
from contracts import Observation
from vla.lora import named_adapters, refresh_adapters
from vla.memory import limit_memory
from vla.policy import Policy
from vla.tokens import FIRST_ACTION_TOKEN


@dataclass(frozen=True)
class Args:
    folder: Annotated[str, tyro.conf.Positional]
    """The checkpoint (`benchmarks/full_size.py` writes one with random weights of the 7B's size)."""
    memory_gib: float = 12.0
    """Limit of the GPU allocator while the 4-bit policy is measured."""
    repeats: int = 5
    batches: tuple[int, ...] = (1, 8)
    """Observations decided together."""
    micro_batches: tuple[int, ...] = (1, 2)
    observations: int = 16
    """Of the agreement; decided in the largest of --batches."""
    task_suite: str = "libero_spatial"


def main(args: Args) -> None:
    on_gpu = torch.cuda.is_available()
    name = f"{torch.cuda.get_device_name()}, " if on_gpu else ""
    print(f"{name}torch {torch.__version__}", flush=True)
    if on_gpu:
        limit_memory(args.memory_gib, torch.device("cuda"))
        print(f"the allocator may take {args.memory_gib:g} GiB", flush=True)
    policy = load(args, in_4bit=True)
    rounded = agreement_logits(policy, args)
    measure(policy, args)
    del policy
    free_memory()
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(1.0)
        print(f"now all of the GPU; {torch.cuda.memory_allocated() / GIB:.2f} GiB are still held", flush=True)
    policy = load(args, in_4bit=False)
    compare(agreement_logits(policy, args), rounded)
    measure(policy, args)


def load(args: Args, in_4bit: bool) -> Policy:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    policy = Policy.load(
        args.folder,
        task_suite=args.task_suite,
        device="cuda" if on_gpu else "cpu",
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        compile_network=on_gpu,
        load_in_4bit=in_4bit,
    )
    took = time.perf_counter() - started
    held = f", {torch.cuda.memory_allocated() / GIB:.2f} GiB with adapters{memory()}" if on_gpu else ""
    print(f"{policy.precision}: loaded in {took:.1f} s{held}", flush=True)
    change_adapters(policy)
    return policy


def measure(policy: Policy, args: Args) -> None:
    """Lines on deciding and updating."""
    for batch in args.batches:
        observations = prepared_observations(policy, batch)
        report(f"{policy.precision}: act", batch, lambda rows=observations: policy.act(rows), args.repeats)
    for recomputed, label in ((policy.network.num_blocks, "all blocks"), (0, "nothing")):
        for micro in args.micro_batches:
            forget_recordings(policy)
            policy.network.recompute(recomputed)
            observations = prepared_observations(policy, micro)
            name = f"{policy.precision}: update, recomputing {label}"
            report(name, micro, lambda rows=observations: learn(policy, rows), args.repeats)


def change_adapters(policy: Policy) -> None:
    """As training would: the same for both policies, because drawn on the CPU map by map of the base."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, (_, up) in named_adapters(policy.network):
            up.copy_(0.02 * torch.randn(up.shape, generator=generator))
    refresh_adapters(policy.network, force=True)


def agreement_logits(policy: Policy, args: Args) -> Tensor:
    observations = prepared_observations(policy, args.observations)
    size = max(args.batches)
    with torch.no_grad():
        parts = [policy.chunk_logits(observations[i : i + size]).cpu() for i in range(0, len(observations), size)]
    return torch.cat(parts)


def learn(policy: Policy, observations: list[Observation]) -> None:
    for parameter in trainable(policy):
        parameter.grad = None
    learn_from(policy, observations)


def report(name: str, count: int, call: Callable[[], object], repeats: int) -> None:
    """A line: milliseconds for each of the `count` rows, peak memory with everything that was there before."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    try:
        call()
        first = time.perf_counter() - started
        milliseconds = 1e3 * timed(call, repeats) / count
    except torch.OutOfMemoryError:
        print(f"{name:46} {count:2}: does not fit", flush=True)
        return
    print(f"{name:46} {count:2}: {milliseconds:7.1f} ms each{memory()}, first {first:.1f} s", flush=True)


def memory() -> str:
    if not torch.cuda.is_available():
        return ""
    return f", peak {peak():5.2f} GiB allocated, {torch.cuda.max_memory_reserved() / GIB:5.2f} reserved"


def compare(reference: Tensor, rounded: Tensor) -> None:
    """What rounding the base changes, on the tokens that bfloat16 chooses."""
    tokens = reference.argmax(-1) + FIRST_ACTION_TOKEN
    same = (rounded.argmax(-1) + FIRST_ACTION_TOKEN == tokens).float().mean()
    before, after = (Policy.token_logprobs(logits, tokens, 1.0) for logits in (reference, rounded))
    chances = reference.softmax(-1)
    divergence = (chances * (reference.log_softmax(-1) - rounded.log_softmax(-1))).sum(-1)
    print(
        f"{same:.1%} of the greedy tokens are equal; {describe_agreement(after, before)}; "
        f"mean KL divergence of tokens {divergence.mean():.4f}; "
        f"the reference's greedy tokens have a probability of {chances.max(-1).values.mean():.3f} on average",
        flush=True,
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
