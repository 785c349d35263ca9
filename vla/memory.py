"""How an update fits into a GPU's memory: the micro-batch, and how many blocks recompute their activations."""

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from contracts import BadInput, Observation
from vla.eight_bits import FORMATS
from vla.policy import Policy
from vla.preprocessing import synthetic_observations

log = logging.getLogger(__name__)

GIB = 2**30
COPIES_OF_TRAINABLE = 4  # gradients (twice on a rank that has none of its own) and AdamW's two moments
MARGIN = 1.0  # GiB, for recorded forward passes and the allocator's gaps between weights
# What recorded passes take over what their tensors take: on an H200 1.13 to 1.17 (2 to 11 samples), with 8 bits 1.38
GAPS, GAPS_OF_8_BITS = 1.2, 1.4
ADVICE = (
    "close other programs on the GPU, lower --lora-rank, raise --memory-budget, or use a GPU with more memory"
)


class Need(NamedTuple):
    """Peak bytes of one sample's forward and backward pass when the first `recomputed_blocks` blocks recompute."""

    recomputed_blocks: int
    bytes: int
    share: float  # of the forward pass that is computed twice


def fit_to_memory(
    policy: Policy, gradient_checkpointing: Literal["auto", "on", "off"], micro_batch_size: int | Literal["auto"],
    share: int, others_bytes: float = 0.0,
) -> int:  # fmt: skip
    """Decide which blocks recompute, and the micro-batch where it is "auto"; returns the latter. Raises BadInput.

    share: the most decisions that this device gets of a minibatch; others_bytes: of the GPU, for other processes.
    """
    network = policy.network
    blocks = network.num_blocks if gradient_checkpointing == "on" else 0
    if policy.device.type == "cuda" and "auto" in (gradient_checkpointing, micro_batch_size):
        log.info(
            "measuring what fits into memory; a large network is compiled first: a minute or two on a first start"
        )
        needs = measure_needs(
            policy, synthetic_observations(policy.num_images, policy.statistics.proprio, 1)[0]
        )
        if gradient_checkpointing != "auto":
            needs = [need for need in needs if need.recomputed_blocks == blocks]
        sizes = range(1, share + 1) if micro_batch_size == "auto" else (micro_batch_size,)
        micro_batch_size, blocks = choose_plan(needs, free_for_activations(policy, others_bytes), sizes)
    network.recomputed_blocks = blocks
    return share if micro_batch_size == "auto" else micro_batch_size


def limit_memory(gib: float | None, device: torch.device) -> None:
    """Let this process's tensors have at most so many GiB of the GPU. Raises BadInput when there are not so many."""
    if gib is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    if gib * GIB > total:
        found = f"{device} has {total / GIB:.1f} GiB of GPU memory"
        raise BadInput(f"--memory-budget {gib:g}: {found}; give less, or leave the flag out")
    torch.cuda.set_per_process_memory_fraction(gib * GIB / total, device.index or 0)


def measure_needs(policy: Policy, observation: Observation) -> list[Need]:
    """What a sample needs with no block, the vision blocks and all blocks recomputed."""
    network, needs = policy.network, list[Need]()
    sizes = [
        sum(p.numel() for p in part.parameters())
        for part in (network.vision_backbone, network.language_model)
    ]
    share_of_vision = sizes[0] / sum(sizes)  # both see about as many tokens
    for blocks, share in (
        (network.num_blocks, 1.0),
        (network.vision_backbone.num_blocks, share_of_vision),
        (0, 0.0),
    ):
        network.recomputed_blocks = blocks
        try:
            needs.insert(0, Need(blocks, _peak_of_one(policy, observation), share))
        except torch.OutOfMemoryError:
            break  # and so will all that recompute less
    return needs


def _peak_of_one(policy: Policy, observation: Observation) -> int:
    parameters, device = [parameter for _, parameter in policy.named_trainable_parameters()], policy.device
    for _ in range(2):  # the first pass compiles
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        logits, _ = policy.network(*policy.model_inputs([observation]))
        torch.autograd.grad(logits.sum(), parameters, allow_unused=True)
        peak = torch.cuda.max_memory_allocated(device) - before
    return peak


def choose_plan(
    needs: Sequence[Need], free_bytes: float, micro_batch_sizes: Sequence[int]
) -> tuple[int, int]:
    """(Micro-batch, blocks that recompute) of the fastest plan that fits, by the time that was seen on an H200.

    Between two measured needs both bytes and share are in proportion.
    """
    if not needs:
        raise BadInput(
            f"out of GPU memory in one update of one decision, see --gradient-checkpointing: {ADVICE}"
        )
    measured, sizes, shares = zip(*needs, strict=True)
    blocks = np.arange(measured[0], measured[-1] + 1)
    sizes, shares = np.interp(blocks, measured, sizes), np.interp(blocks, measured, shares)
    plans = [
        ((2 + share) * (0.8 + 0.4 / micro_batch_size), (micro_batch_size, int(block)))
        for micro_batch_size in micro_batch_sizes
        for block, size, share in zip(blocks, sizes, shares, strict=True)
        if micro_batch_size * size <= free_bytes
    ]
    if not plans:
        least, need = min(micro_batch_sizes), needs[-1]
        wanted = f"an update by {least} decision(s) at a time, {need.recomputed_blocks} blocks recomputed"
        found = f"{least * need.bytes / GIB:.1f} GiB beside the weights, {max(free_bytes, 0) / GIB:.1f} GiB are left"
        raise BadInput(
            f"{wanted}, needs {found}: {'lower --micro-batch-size, ' if least > 1 else ''}{ADVICE}"
        )
    return min(plans)[1]


def free_for_activations(policy: Policy, others: float) -> float:
    """Bytes for the tensors of an update's passes: what may still be allocated, less optimizer, gaps and `others`."""
    device = policy.device
    total, allocated = (
        torch.cuda.get_device_properties(device).total_memory,
        torch.cuda.memory_allocated(device),
    )
    may_have = torch.cuda.get_per_process_memory_fraction(device.index or 0) * total - allocated
    unused, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    trainable = sum(p.numel() * p.element_size() for _, p in policy.named_trainable_parameters())
    gaps = GAPS_OF_8_BITS if policy.frozen_weights in FORMATS else GAPS
    return (min(may_have, unused + cached - others) - COPIES_OF_TRAINABLE * trainable - MARGIN * GIB) / gaps
