"""How many observations one pass through the network computes, and half as many when GPU memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from contracts import BadInput, first_line

if TYPE_CHECKING:  # importing it takes seconds
    from vla.model import OpenVLAOFT

log = logging.getLogger(__name__)

T = TypeVar("T")

ADVICE = (
    "lower --num-envs (simulators may render on the GPU), --max-batch, --micro-batch-size or --lora-rank, train fewer "
    "blocks (--trained-blocks 8), raise --memory-budget, close other programs on the GPU, or use a larger one; "
    "a run goes on with --resume RUN, which keeps its --num-envs, --lora-rank and --trained-blocks"
)


def recorded_sizes(largest: int) -> list[int]:
    """The batch sizes that a large network's passes with gradient should have: powers of 2, 3 times these, `largest`.

    Each is warmed up and recorded by itself: all 31 sizes up to 31 would take five times as long as these ten.
    """
    powers = [2**exponent for exponent in range(largest.bit_length())]
    return sorted({size for power in powers for size in (power, 3 * power) if size < largest} | {largest})


def pass_sizes(count: int, largest: int, few_sizes: bool) -> list[int]:
    """Divide `count` observations into passes of at most `largest`. few_sizes: only into `recorded_sizes`."""
    sizes = recorded_sizes(largest) if few_sizes else range(1, largest + 1)
    parts = []
    while count > 0:
        parts.append(max(size for size in sizes if size <= count))
        count -= parts[-1]
    return parts


def smallest_micro_batch(network: OpenVLAOFT) -> int:
    """The smallest useful number of decisions of a learning pass: a compiled network computes a single one as two."""
    return 2 if network.is_compiled else 1


def shrink_until_it_fits(
    network: OpenVLAOFT, batch_size: int, compute: Callable[[int], T], learns: bool, advice: str = ADVICE
) -> tuple[int, T]:
    """Call compute(batch_size), again with half the size if GPU memory runs out. Returns the size and the result.

    The network remembers the smaller size, with which later calls begin. learns: whether it computes gradients. Then
    all blocks recompute their activations if even the smallest batch does not fit. Raises BadInput with the advice when
    nothing is left to try.
    """
    smallest = smallest_micro_batch(network) if learns else 1
    batch_size = min(batch_size, network.largest_batches.get(learns, batch_size))
    while True:
        try:
            return batch_size, compute(batch_size)
        except torch.OutOfMemoryError as error:
            reason = first_line(error)
        # This stands outside the handler, because the exception keeps the failed pass's tensors alive.
        torch.cuda.empty_cache()  # does nothing on a CPU
        if batch_size > smallest:
            batch_size = max(batch_size // 2, smallest)
            network.largest_batches[learns] = batch_size
            log.warning(
                "out of GPU memory (%s); the run goes on with %d decisions at once", reason, batch_size
            )
        elif learns and network.recompute_everything():
            log.warning("out of GPU memory (%s); the run goes on with all activations recomputed", reason)
        else:
            raise BadInput(f"out of GPU memory ({reason}) in the smallest pass: {advice}")
