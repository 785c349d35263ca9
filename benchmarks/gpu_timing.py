"""Time, MFU and memory of calls on a GPU, for the other scripts here."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from contracts import Observation
from vla.cuda_graphs import GraphedNetwork
from vla.policy import Policy
from vla.preprocessing import model_input_images
from vla.probes import synthetic_observations
from vla.tokens import FIRST_ACTION_TOKEN

GIB = 2**30
TFLOP_FORWARD = 8.6  # of one observation with two images, 599 tokens, in the 7B network


def report(name: str, count: int, call: Callable[[], object], repeats: int, ceiling: float, passes: int) -> None:
    """A line: milliseconds for each of the `count` rows of a call, MFU, memory. passes: forward passes' worth of work.

    ceiling: TFLOP/s that count as 100 %.
    """
    torch.cuda.reset_peak_memory_stats()
    try:
        milliseconds = 1e3 * timed(call, repeats) / count
    except torch.OutOfMemoryError:
        print(f"{name:32} {count:3}: does not fit", flush=True)
        return
    share = passes * TFLOP_FORWARD / (milliseconds / 1e3) / ceiling
    print(
        f"{name:32} {count:3}: {milliseconds:6.1f} ms each, {share:4.0%} MFU, peak {peak():5.2f} GiB allocated, "
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
    torch.cuda.empty_cache()


def prepared_observations(policy: Policy, count: int) -> list[Observation]:
    """As the simulators' processes deliver them: preprocessing is not this process's work."""
    return [
        replace(observation, images=model_input_images(observation.images, policy.image_size), prepared=True)
        for observation in synthetic_observations(policy, count)
    ]


def learn_from(policy: Policy, observations: Sequence[Observation]) -> None:
    """Forward and backward pass of a micro-batch; the gradient is added to what is there."""
    logits = policy.chunk_logits(observations)
    tokens = logits.argmax(-1) + FIRST_ACTION_TOKEN
    policy.token_logprobs(logits, tokens, 1.0).mean().backward()


def trainable(policy: Policy) -> list[torch.nn.Parameter]:
    return [parameter for _, parameter in policy.named_trainable_parameters()]


def forget_recordings(policy: Policy) -> None:
    """Nothing recorded before, and no gradient, takes memory beside what is measured next."""
    for parameter in trainable(policy):
        parameter.grad = None
    if isinstance(policy._forward, GraphedNetwork):
        policy._forward.forget()
    free_memory()
