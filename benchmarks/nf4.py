"""The policy with its base in 4 bits beside the same in bfloat16, in one run: memory, speed, and what rounding changes.

    python -m benchmarks.nf4 FOLDER [--memory-gib 12]

Both have the same adapters, random and not zero. bfloat16 comes first and has the whole GPU; the allocator of the
4-bit policy is capped at --memory-gib, from its loading on: what does not fit fails. Agreement is on synthetic
observations: the share of equal greedy tokens, and how far the log-probabilities of bfloat16's greedy tokens are apart.
With random weights these logits are nearly flat, so that rounding turns over more tokens than in a trained policy.
On a CPU it runs in float32, without cap and memory: a test of itself.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro
from torch import Tensor

from benchmarks.gpu_timing import GIB, free_memory, learn_from, peak, prepared_observations, timed, trainable
from vla.action_tokenizer import FIRST_ACTION_TOKEN
from vla.cuda_graphs import GraphedNetwork
from vla.lora import named_adapters, refresh_adapters
from vla.memory import limit_memory
from vla.policy import Policy


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
    device = torch.device("cuda" if on_gpu else "cpu")
    name = f"{torch.cuda.get_device_name()}, " if on_gpu else ""
    print(f"{name}torch {torch.__version__}", flush=True)
    reference = measure(args, device, in_4bit=False)
    free_memory()
    if on_gpu:
        limit_memory(args.memory_gib, device)
        print(f"from here on the allocator may take {args.memory_gib:g} GiB", flush=True)
    compare(reference, measure(args, device, in_4bit=True))


def measure(args: Args, device: torch.device, in_4bit: bool) -> Tensor:
    """Lines on loading, deciding and updating; returns the logits (N, A, 256) of the agreement, on the CPU."""
    started = time.perf_counter()
    policy = Policy.load(
        args.folder,
        task_suite=args.task_suite,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        compile_network=device.type == "cuda",
        load_in_4bit=in_4bit,
    )
    name = policy.precision
    held = f", {torch.cuda.memory_allocated() / GIB:.2f} GiB" if device.type == "cuda" else ""
    print(f"{name}: loaded in {time.perf_counter() - started:.1f} s{memory(device)}, holds{held or ' ?'}", flush=True)
    change_adapters(policy)
    logits = agreement_logits(policy, args)  # before anything else could fail for want of memory
    for batch in args.batches:
        observations = prepared_observations(policy, batch)
        report(f"{name}: act", batch, lambda rows=observations: policy.act(rows), args.repeats, device)
    for recomputed, label in ((policy.network.num_blocks, "all blocks"), (0, "nothing")):
        for micro in args.micro_batches:
            start_again(policy, recomputed)
            observations = prepared_observations(policy, micro)
            report(
                f"{name}: update sample, recomputing {label}",
                micro,
                lambda rows=observations: learn(policy, rows),
                args.repeats,
                device,
            )
    return logits


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


def start_again(policy: Policy, recomputed: int) -> None:
    """No recorded passes, no gradients, and another choice of what is recomputed."""
    for parameter in trainable(policy):
        parameter.grad = None
    if isinstance(policy._forward, GraphedNetwork):
        policy._forward = GraphedNetwork(policy.network)
    free_memory()
    policy.network.recompute(recomputed)


def learn(policy: Policy, observations: list) -> None:
    for parameter in trainable(policy):
        parameter.grad = None
    learn_from(policy, observations)


def report(name: str, count: int, call: Callable[[], object], repeats: int, device: torch.device) -> None:
    """A line: milliseconds for each of the `count` rows, peak memory with everything that was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    try:
        call()
        first = time.perf_counter() - started
        milliseconds = 1e3 * timed(call, repeats) / count
    except torch.OutOfMemoryError:
        print(f"{name:50} {count:2}: does not fit", flush=True)
        return
    print(f"{name:50} {count:2}: {milliseconds:7.1f} ms each{memory(device)}, first {first:.1f} s", flush=True)


def memory(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f", peak {peak():5.2f} GiB allocated, {torch.cuda.max_memory_reserved() / GIB:5.2f} reserved"


def compare(reference: Tensor, rounded: Tensor) -> None:
    """What rounding the base changes, on the tokens that bfloat16 chooses."""
    tokens = reference.argmax(-1) + FIRST_ACTION_TOKEN
    same = (rounded.argmax(-1) + FIRST_ACTION_TOKEN == tokens).float().mean()
    before, after = (Policy.token_logprobs(logits, tokens, 1.0) for logits in (reference, rounded))
    apart = after - before
    chances = reference.softmax(-1)
    divergence = (chances * (reference.log_softmax(-1) - rounded.log_softmax(-1))).sum(-1)
    print(
        f"{same:.1%} of the greedy tokens are equal; log-probs apart by {apart.abs().mean():.4f} on average, "
        f"{apart.abs().max():.4f} at most; mean |ratio - 1| of chunks {(apart.mean(-1).exp() - 1).abs().mean():.4f}, "
        f"of tokens {(apart.exp() - 1).abs().mean():.4f}; mean KL divergence of tokens {divergence.mean():.4f}",
        flush=True,
    )
    likeliest = chances.max(-1).values
    print(f"likeliest tokens: {likeliest.mean():.3f} on average in the reference", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
