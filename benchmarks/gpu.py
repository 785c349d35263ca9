"""The 7B network on one GPU, ours beside the plain one in the same run: deciding, updating, memory.

    python -m benchmarks.gpu [--folder FOLDER] [--memory-gib 24]

Random weights at full size (written once to --folder, 15 GB), two images, bfloat16, 599 tokens. One forward pass of
an observation is 8.6 TFLOP, of an update's sample twice that: the frozen weights get no gradient. MFU is the share of
the rate of an 8192 x 8192 x 8192 product measured in the same run. The allocator is capped: what does not fit fails.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import tyro

from benchmarks.full_size import write_full_size
from benchmarks.plain import make_plain, plain_logits
from vla.action_tokenizer import FIRST_ACTION_TOKEN
from vla.blocks import llama_block, vit_block
from vla.checkpoint import inspect_checkpoint, load_network
from vla.cuda_graphs import GraphedNetwork
from vla.lora import refresh_adapters
from vla.memory import choose_plan, free_for_activations, measure_needs
from vla.policy import Policy
from vla.preprocessing import model_input_images
from vla.probes import synthetic_observations

GIB = 2**30
TFLOP_FORWARD = 8.6


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
    micro_batches: tuple[int, ...] = (1, 2, 3, 4, 8)


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
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, args.memory_gib * GIB / total))
    if args.plain:
        measure_plain(folder, args, ceiling)
        free_memory()
    started = time.perf_counter()
    policy = load(folder)
    print(f"load {time.perf_counter() - started:.1f} s, {torch.cuda.memory_allocated() / GIB:.2f} GiB", flush=True)
    measure_plan(policy)
    measure_deciding(policy, args, ceiling)
    measure_updating(policy, args, ceiling)
    measure_optimizer(policy)
    measure_agreement(policy)


def load(folder: Path) -> Policy:
    return Policy.load(
        str(folder), task_suite="libero_spatial", device="cuda", dtype=torch.bfloat16, compile_network=True
    )


def prepared_observations(policy: Policy, count: int) -> list:
    """As the simulators' processes deliver them: preprocessing is not this process's work."""
    return [
        replace(observation, images=model_input_images(observation.images, policy.image_size), prepared=True)
        for observation in synthetic_observations(policy, count)
    ]


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
            report("plain act", batch, lambda n=batch: plain_logits(network, rows(n), False), args, ceiling, 1)
    for checkpointing, micro in ((True, 1), (True, 2), (False, 1), (False, 2)):
        name = f"plain update{', recomputing' if checkpointing else ''}"

        def update(n: int = micro, c: bool = checkpointing) -> None:
            network.zero_grad(set_to_none=True)
            plain_logits(network, rows(n), c).log_softmax(-1).mean().backward()

        report(name, micro, update, args, ceiling, 2)


def measure_deciding(policy: Policy, args: Args, ceiling: float) -> None:
    observations = prepared_observations(policy, max(args.batches))
    for batch in args.batches:
        started = time.perf_counter()
        policy.act(observations[:batch])
        first = time.perf_counter() - started
        report("act", batch, lambda n=batch: policy.act(observations[:n]), args, ceiling, 1, f"first {first:.1f} s")
    with policy.teacher():
        report("act, teacher", 1, lambda: policy.act(observations[:1]), args, ceiling, 1)


def measure_plan(policy: Policy) -> None:
    needs = measure_needs(policy, synthetic_observations(policy, 1)[0])
    free = free_for_activations(policy)
    listed = ", ".join(f"{need.bytes / GIB:.2f} GiB with {need.recomputed_blocks} blocks recomputed" for need in needs)
    print(f"a sample's passes take {listed}; {free / GIB:.2f} GiB are free for them")
    for batch in (2, 8, 32):
        plan = choose_plan(needs, free, batch)
        print(f"batch {batch}: micro-batch {plan.micro_batch_size}, {plan.recomputed_blocks} blocks", flush=True)


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
        apart = logprobs - policy.token_logprobs(logits, tokens, 1.0)
        print(
            f"{name}: {(tokens == greedy).float().mean():.1%} of the greedy tokens are float32's; log-probs apart by "
            f"{apart.abs().mean():.4f} on average, {apart.abs().max():.4f} at most; mean |ratio - 1| of chunks "
            f"{(apart.mean(-1).exp() - 1).abs().mean():.4f}",
            flush=True,
        )


def measure_updating(policy: Policy, args: Args, ceiling: float) -> None:
    observations = prepared_observations(policy, max(args.micro_batches))
    num_blocks = policy.network.num_blocks
    for recomputed, label in ((0, "nothing"), (num_blocks, "all blocks")):
        for micro in args.micro_batches:
            policy._forward = GraphedNetwork(policy.network)  # another choice, another recording
            free_memory()
            policy.network.recompute(recomputed)
            name = f"update, recomputing {label}"
            try:
                report(name, micro, lambda n=micro: update_sample(policy, observations[:n]), args, ceiling, 2)
            except torch.OutOfMemoryError:
                print(f"{name:32} {micro:3}: does not fit into {args.memory_gib:g} GiB", flush=True)
            free_memory()


def measure_optimizer(policy: Policy) -> None:
    policy.network.recompute(0)
    policy._forward = GraphedNetwork(policy.network)
    free_memory()
    observations = prepared_observations(policy, 2)
    optimizer = torch.optim.AdamW([p for _, p in policy.named_trainable_parameters()], lr=1e-6, fused=True)

    def step() -> None:
        update_sample(policy, observations)
        parameters = [p for _, p in policy.named_trainable_parameters() if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    step()
    torch.cuda.reset_peak_memory_stats()
    took = timed(step, 8)
    print(f"optimizer step of 2 samples, everything: {1e3 * took:.1f} ms, peak {peak():.2f} GiB", flush=True)
    assert all(torch.isfinite(p).all() for _, p in policy.named_trainable_parameters()), "NaN in a parameter"


def update_sample(policy: Policy, observations: Sequence) -> None:
    """What one micro-batch of an update costs."""
    for _, parameter in policy.named_trainable_parameters():
        parameter.grad = None
    logits = policy.chunk_logits(observations)
    tokens = logits.argmax(-1) + FIRST_ACTION_TOKEN
    policy.token_logprobs(logits, tokens, 1.0).mean().backward()


def report(
    name: str, count: int, call: Callable[[], object], args: Args, ceiling: float, passes: int, note: str = ""
) -> None:
    torch.cuda.reset_peak_memory_stats()
    milliseconds = 1e3 * timed(call, args.repeats) / count
    share = passes * TFLOP_FORWARD / (milliseconds / 1e3) / ceiling
    print(
        f"{name:32} {count:3}: {milliseconds:6.1f} ms each, {share:4.0%} MFU, peak {peak():5.2f} GiB allocated, "
        f"{torch.cuda.max_memory_reserved() / GIB:5.2f} reserved {note}",
        flush=True,
    )


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call that ends with the GPU idle, after two calls that do not count."""
    durations = []
    for i in range(repeats + 2):
        started = time.perf_counter()
        call()
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
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
