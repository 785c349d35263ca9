"""How an update fits into a GPU's memory: the micro-batch and how many blocks recompute their activations.

Nothing of this changes a gradient beyond rounding. What a sample needs is measured on the GPU at hand, not computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from contracts import Observation
from errors import BadInput
from vla.nf4 import num_in_4bit
from vla.policy import Policy

GIB = 2**30
# Beside activations: gradients (twice on a rank that has none of its own) and AdamW's two moments, each as large as the
# adapters.
COPIES_OF_TRAINABLE = 4
MARGIN = 1.0  # GiB, for recorded forward passes and the allocator's gaps between weights
# What recorded passes take over what their tensors take, for gaps. Seen on an H200: 1.13 to 1.17 (2 to 11 samples),
# 1.21 with 4-bit weights.
GAPS = 1.2


@dataclass(frozen=True)
class MemoryPlan:
    micro_batch_size: int
    recomputed_blocks: int


@dataclass(frozen=True)
class Need:
    """Peak bytes of one sample's forward and backward pass when the first `recomputed_blocks` blocks recompute."""

    recomputed_blocks: int
    bytes: int
    share: float  # of the forward pass that is computed twice


def limit_memory(gib: float | None, device: torch.device) -> None:
    """Let this process's tensors have at most so many GiB of the GPU. Raises BadInput when there are not so many."""
    if gib is None:
        return
    if device.type != "cuda":
        raise BadInput("--memory-budget limits the memory of a GPU, and the policy runs on a CPU: leave the flag out")
    total = torch.cuda.get_device_properties(device).total_memory
    if gib * GIB > total:
        raise BadInput(f"--memory-budget {gib:g}: the GPU has {total / GIB:.1f} GiB; give less, or leave the flag out")
    torch.cuda.set_per_process_memory_fraction(gib * GIB / total, device.index or 0)


def measure_needs(policy: Policy, observation: Observation) -> list[Need]:
    """What a sample needs with no block, the vision blocks and all blocks recomputed."""
    network = policy.network
    vision, everything = network.vision_backbone.num_blocks, network.num_blocks
    parts = (network.vision_backbone, network.language_model)
    sizes = [sum(p.numel() for p in part.parameters()) + num_in_4bit(part) for part in parts]
    vision_share = sizes[0] / sum(sizes)  # both see about as many tokens
    needs = []
    for blocks, share in ((everything, 1.0), (vision, vision_share), (0, 0.0)):
        network.recompute(blocks)
        try:
            needs.append(Need(blocks, _peak_of_one(policy, observation), share))
        except torch.OutOfMemoryError:
            break  # and so will all that recompute less
    network.recompute(0)
    if not needs:
        raise BadInput(
            "out of GPU memory in one update of one decision with all activations recomputed; set --load-in-4bit, "
            "close other programs on the GPU, raise --memory-budget, or use a GPU with more memory"
        )
    return needs[::-1]


def _peak_of_one(policy: Policy, observation: Observation) -> int:
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
    for _ in range(2):  # the first pass compiles
        torch.cuda.synchronize(policy.device)
        torch.cuda.reset_peak_memory_stats(policy.device)
        before = torch.cuda.memory_allocated(policy.device)
        logits, _ = policy.network(*policy.model_inputs([observation]))
        torch.autograd.grad(logits.sum(), parameters, allow_unused=True)
        peak = torch.cuda.max_memory_allocated(policy.device) - before
    return peak


def choose_plan(needs: Sequence[Need], free_bytes: float, batch_size: int) -> MemoryPlan:
    """The fastest of the plans that fit, by what was seen on an H200: time is (2 + share) * (0.8 + 0.4 / micro-batch).

    Raises BadInput when nothing fits.
    """
    plans = []
    for micro_batch_size in range(1, batch_size + 1):
        fitting = _fewest_recomputed(needs, free_bytes / micro_batch_size)
        if fitting is not None:
            blocks, share = fitting
            plans.append(((2 + share) * (0.8 + 0.4 / micro_batch_size), MemoryPlan(micro_batch_size, blocks)))
    if not plans:
        raise BadInput(
            f"one update of one decision needs {needs[-1].bytes / GIB:.1f} GiB beside the weights with all activations "
            f"recomputed, {max(free_bytes, 0) / GIB:.1f} GiB are left; set --load-in-4bit, close other programs on "
            "the GPU, lower --lora-rank, raise --memory-budget, or use a GPU with more memory"
        )
    return min(plans, key=lambda plan: plan[0])[1]


def _fewest_recomputed(needs: Sequence[Need], bytes_per_sample: float) -> tuple[int, float] | None:
    """(blocks, share), between two measured needs by proportion; None when even the smallest does not fit."""
    if needs[0].bytes <= bytes_per_sample:
        return needs[0].recomputed_blocks, needs[0].share
    for more, less in pairwise(needs):
        if less.bytes <= bytes_per_sample < more.bytes:
            part = (more.bytes - bytes_per_sample) / (more.bytes - less.bytes)
            blocks = more.recomputed_blocks + part * (less.recomputed_blocks - more.recomputed_blocks)
            return min(int(blocks) + 1, less.recomputed_blocks), more.share + part * (less.share - more.share)
    return None


def free_for_activations(policy: Policy, others: float = 0.0) -> float:
    """Bytes that the tensors of an update's passes may take: what the process may still allocate, less the optimizer's
    share and gaps. others: bytes that other processes are going to take.
    """
    device = policy.device
    total = torch.cuda.get_device_properties(device).total_memory
    may_have = torch.cuda.get_per_process_memory_fraction(device.index or 0) * total - torch.cuda.memory_allocated(
        device
    )
    unused, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    trainable = sum(
        parameter.numel() * parameter.element_size() for _, parameter in policy.named_trainable_parameters()
    )
    return (min(may_have, unused + cached - others) - COPIES_OF_TRAINABLE * trainable - MARGIN * GIB) / GAPS
