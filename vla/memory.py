"""Plan how an update fits into a GPU's memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from contracts import GIB, BadInput, Observation
from vla.pass_sizes import ADVICE, smallest_micro_batch
from vla.preprocessing import MADE_UP_INSTRUCTION, synthetic_observations

if TYPE_CHECKING:  # importing them takes seconds
    from vla.model import OpenVLAOFT
    from vla.policy import Policy

log = logging.getLogger(__name__)

# Tensors as large as the trainable parameters: the gradients (1; 2 on a rank that computed none, because
# `Ranks.sum_gradients` makes zeros beside the recorded passes' buffers), and AdamW's moments (2).
COPIES_OF_TRAINABLE = 4
MARGIN_BYTES = 1.0 * GIB  # for recorded forward passes and the allocator's gaps between weights
# Memory of a recorded pass / memory of its tensors. Measured on an H200: 1.13 to 1.17 (2 to 11 samples), and 1.38 with
# int8.
GAPS_FACTOR = 1.2
GAPS_FACTOR_OF_INT8 = 1.4
# The time of a pass: a part that grows with the micro-batch, and a part that does not.
TIME_PER_SAMPLE = 0.8
TIME_PER_PASS = 0.4
FORWARD_AND_BACKWARD = 2.0  # passes of an update in which nothing is recomputed


class Plan(NamedTuple):
    """How an update is computed."""

    micro_batch_size: int
    recomputed_blocks: int  # for `OpenVLAOFT.recomputed_blocks`


class RolloutSize(NamedTuple):
    """What decides where the hidden states of a frozen trunk are kept."""

    num_decisions: int  # of which this process keeps the states
    main_memory_bytes: float  # that they may take


NO_ROLLOUT = RolloutSize(0, 0.0)


class MemoryNeed(NamedTuple):
    """Peak memory of one sample's forward and backward pass if the first `recomputed_blocks` blocks are recomputed."""

    recomputed_blocks: int
    bytes: int
    recomputed_share: float  # share of the forward pass that is computed twice


def plan_update(
    policy: Policy,
    micro_batch_size: int | Literal["auto"],
    most_decisions: int,
    reserved_bytes: float = 0.0,
    instruction: str = MADE_UP_INSTRUCTION,
    rollout: RolloutSize = NO_ROLLOUT,
) -> Plan:
    """Choose which blocks recompute their activations, and the micro-batch size, by measuring.

    Sets the network's `recomputed_blocks` to the plan's, and with a frozen trunk the policy's `kept_on`.
    micro_batch_size: the largest one allowed, because a resumed run may have a smaller GPU; "auto": most_decisions, the
    largest number of decisions of a minibatch that this device computes. reserved_bytes: GPU memory that other
    processes are going to use. instruction: one that the policy will get, because a large network is compiled for the
    length of its prompt. Raises BadInput when nothing fits. On a CPU everything is taken to fit.
    """
    smallest = smallest_micro_batch(policy.network)
    largest = most_decisions if micro_batch_size == "auto" else micro_batch_size
    sizes = list(range(smallest, max(largest, smallest) + 1))
    plan = Plan(sizes[-1], 0)
    if policy.device.type == "cuda":
        (observation,) = synthetic_observations(policy.num_images, policy.statistics.proprio, 1, instruction)
        plan = _measured_plan(policy, sizes, reserved_bytes, observation, rollout)
    policy.network.recomputed_blocks = plan.recomputed_blocks
    return plan


def _measured_plan(
    policy: Policy,
    micro_batch_sizes: Sequence[int],
    reserved_bytes: float,
    observation: Observation,
    rollout: RolloutSize,
) -> Plan:
    """The fastest plan of these sizes that fits. With a frozen trunk, also set where its states are kept."""
    log.info(
        "measuring what fits into memory; a large network is compiled first, a minute or two the first time"
    )
    needs = measure_needs(policy, observation)
    torch.cuda.empty_cache()  # simulators start next, and need the memory that the plan leaves
    free_bytes = free_for_activations(policy, reserved_bytes)
    plan = choose_plan(needs, free_bytes, micro_batch_sizes)
    if policy.network.trained_blocks is None:
        return plan
    decision_bytes = bytes_of_kept_states(policy, observation)
    kept_bytes = rollout.num_decisions * decision_bytes
    beside = plan_beside_kept_states(plan, needs, free_bytes - kept_bytes, micro_batch_sizes)
    # torch rounds every pinned tensor up to a power of two.
    pinned_bytes = rollout.num_decisions * 2 ** math.ceil(math.log2(decision_bytes))
    in_main_memory = torch.device("cpu") if pinned_bytes <= rollout.main_memory_bytes else None
    policy.kept_on = in_main_memory if beside is None else policy.device
    return beside or plan


@torch.no_grad()
def bytes_of_kept_states(policy: Policy, observation: Observation) -> int:
    """The size of what a frozen trunk keeps of one observation."""
    hidden, _ = policy.network.trunk(*policy.model_inputs([observation, observation]))
    return hidden[0].nbytes


def plan_beside_kept_states(
    plan: Plan, needs: Sequence[MemoryNeed], free_bytes: float, micro_batch_sizes: Sequence[int]
) -> Plan | None:
    """The plan for what a rollout's states leave free on the GPU; None if they belong into main memory.

    That is where more blocks than in `plan` would be recomputed for them: fetching the states of a sample from main
    memory should take 2 % of its update, by the speed of the bus, and recomputing one of eight blocks takes 6 %.
    """
    try:
        beside = choose_plan(needs, free_bytes, micro_batch_sizes)
    except BadInput:
        return None
    return beside if beside.recomputed_blocks <= plan.recomputed_blocks else None


def measure_needs(policy: Policy, observation: Observation) -> list[MemoryNeed]:
    """Measure a sample's memory, in order of the number of recomputed blocks; cases that do not fit are left out."""
    needs: list[MemoryNeed] = []
    for recomputed_blocks, share in cases_to_measure(policy.network):
        policy.network.recomputed_blocks = recomputed_blocks
        try:
            sample_bytes = _bytes_per_sample(policy, observation)
        except torch.OutOfMemoryError:
            break  # recomputing fewer blocks needs even more
        needs.insert(0, MemoryNeed(recomputed_blocks, sample_bytes, share))
    return needs


def cases_to_measure(network: OpenVLAOFT) -> list[tuple[int, float]]:
    """(Recomputed blocks, share of the forward pass): all blocks, those of vision, half of these, none.

    Above a frozen trunk only all and none.
    """
    if network.trained_blocks is not None:
        return [(network.num_blocks, 1.0), (0, 0.0)]
    num_vision = sum(p.numel() for p in network.vision_backbone.parameters())
    num_language = sum(p.numel() for p in network.language_model.parameters())
    share_of_vision = num_vision / (num_vision + num_language)  # both process about the same number of tokens
    vision_blocks = len(network.vision_backbone.computed_blocks)
    return [
        (network.num_blocks, 1.0),
        (vision_blocks, share_of_vision),
        (vision_blocks // 2, share_of_vision / 2),
        (0, 0.0),
    ]


def _bytes_per_sample(policy: Policy, observation: Observation) -> int:
    """Bytes per sample that a forward and backward pass of two samples allocates at its peak."""
    pair = [observation, observation]
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
    device = policy.device
    for _ in range(2):  # the first pass compiles
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        allocated_before = torch.cuda.memory_allocated(device)
        logits, _ = policy.network(*policy.model_inputs(pair))
        torch.autograd.grad(logits.sum(), parameters, allow_unused=True)
        peak = torch.cuda.max_memory_allocated(device) - allocated_before
    return peak // len(pair)


def choose_plan(needs: Sequence[MemoryNeed], free_bytes: float, micro_batch_sizes: Sequence[int]) -> Plan:
    """Choose the fastest plan that fits, by a formula fitted to measurements on an H200. Raises BadInput if none fits.

    Between two measured numbers of recomputed blocks, bytes and share are interpolated linearly.
    """
    if not needs:
        raise BadInput(f"out of GPU memory in one update of a single decision: {ADVICE}")
    measured_blocks = [need.recomputed_blocks for need in needs]
    blocks = np.arange(measured_blocks[0], measured_blocks[-1] + 1)
    bytes_per_sample = np.interp(blocks, measured_blocks, [need.bytes for need in needs])
    shares = np.interp(blocks, measured_blocks, [need.recomputed_share for need in needs])
    plans = []  # (time per sample, plan)
    for micro_batch_size in micro_batch_sizes:
        for recomputed_blocks, sample_bytes, share in zip(blocks, bytes_per_sample, shares, strict=True):
            if micro_batch_size * sample_bytes <= free_bytes:
                passes = FORWARD_AND_BACKWARD + share
                time = passes * (TIME_PER_SAMPLE + TIME_PER_PASS / micro_batch_size)
                plans.append((time, Plan(micro_batch_size, int(recomputed_blocks))))
    if not plans:
        least = min(micro_batch_sizes) * needs[-1].bytes / GIB
        raise BadInput(
            f"an update needs {least:.1f} GiB besides the weights with all blocks recomputed, and "
            f"{max(free_bytes, 0) / GIB:.1f} GiB are left: {ADVICE}"
        )
    return min(plans)[1]


def free_for_activations(policy: Policy, reserved_bytes: float) -> float:
    """Bytes that are left for the activations of an update, after gradients, optimizer and the allocator's gaps.

    The smaller of two limits counts: --memory-budget, less what this process has allocated; and the free memory of the
    GPU, of which `reserved_bytes` are kept for processes that start later.
    """
    device = policy.device
    total = torch.cuda.get_device_properties(device).total_memory
    allocated = torch.cuda.memory_allocated(device)
    within_budget = torch.cuda.get_per_process_memory_fraction(device.index or 0) * total - allocated
    unused, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    free_on_gpu = unused + cached - reserved_bytes
    free = min(within_budget, free_on_gpu)
    trainable = sum(p.numel() * p.element_size() for _, p in policy.named_trainable_parameters())
    factor = GAPS_FACTOR_OF_INT8 if policy.frozen_weights == "int8" else GAPS_FACTOR
    return (free - COPIES_OF_TRAINABLE * trainable - MARGIN_BYTES) / factor
