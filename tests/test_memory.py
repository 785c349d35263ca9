"""What an update recomputes, how large its micro-batch is, and what happens when memory runs out nevertheless.

Measuring what a sample needs takes a GPU. Here it is given.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.config import TrainConfig
from configs.sections import SimulatorConfig, UpdateConfig
from contracts import GIB, BadInput
from envs.env import TaskInfo
from experiment.setup import plan_memory
from experiment.simulators import SimulatorCount, memory_of_simulator
from rl.ranks import ALONE
from vla import memory
from vla.device import limit_memory
from vla.memory import MemoryNeed, RolloutSize, choose_plan, plan_update, shrink_batch

# Measured on an H200, 7B, two images, bfloat16 (docs/RESULTS.md).
NEEDS = [
    MemoryNeed(0, int(2.58 * GIB), 0.0),
    MemoryNeed(49, int(2.09 * GIB), 0.1),
    MemoryNeed(81, int(0.38 * GIB), 1.0),
]
ADAPTER_BYTES = int(0.2 * GIB)


def test_nothing_is_recomputed_where_everything_fits_and_everything_where_only_that_does():
    assert choose_plan(NEEDS, 6 * GIB, range(1, 3)) == (2, 0)
    assert choose_plan(NEEDS, 0.38 * GIB, range(1, 3)) == (1, 81)


def test_a_gpu_that_is_too_small_is_refused_with_what_is_missing():
    with pytest.raises(BadInput, match=r"needs 0\.4 GiB .* 0\.2 GiB are left"):
        choose_plan(NEEDS, 0.2 * GIB, range(1, 3))


def policy_on_gpu(monkeypatch):
    """A policy of which a sample needs NEEDS."""
    monkeypatch.setattr(memory, "measure_needs", lambda *_: NEEDS)
    adapters = torch.zeros(ADAPTER_BYTES // 4, device="meta")
    return SimpleNamespace(
        device=torch.device("cuda", 0),
        network=SimpleNamespace(num_blocks=81, recomputed_blocks=0, is_compiled=False, trained_blocks=None),
        num_images=1,
        statistics=SimpleNamespace(proprio=None),
        named_trainable_parameters=lambda: [("adapters", adapters)],
        frozen_weights="bf16",
        chunk_length=8,
    )


@pytest.fixture
def policy(monkeypatch):
    """On a GPU where 3 GiB are free for activations."""
    monkeypatch.setattr(memory, "free_for_activations", lambda _, reserved_bytes: 3 * GIB - reserved_bytes)
    return policy_on_gpu(monkeypatch)


@pytest.mark.parametrize(
    ("checkpointing", "micro_batch_size", "most_decisions", "expected_size", "expected_blocks"),
    [
        ("auto", "auto", 1, 1, 0),
        ("auto", 2, 4, 2, 61),
        ("on", "auto", 4, 4, 81),
        ("off", "auto", 4, 1, 0),
        ("off", 4, 4, 4, 0),
    ],
)
def test_flags_decide_and_auto_is_what_fits(
    policy, checkpointing, micro_batch_size, most_decisions, expected_size, expected_blocks
):
    plan = plan_update(policy, checkpointing, micro_batch_size, most_decisions)
    assert plan == (expected_size, expected_blocks)


@pytest.mark.parametrize("micro_batch_size", ["auto", 1])
@pytest.mark.parametrize("checkpointing", ["auto", "on"])
def test_a_compiled_network_learns_from_two_decisions_at_least(policy, checkpointing, micro_batch_size):
    """It would compute a single one twice."""
    policy.network.is_compiled = True
    assert plan_update(policy, checkpointing, micro_batch_size, 1).micro_batch_size == 2
    assert shrink_batch(policy.network, 3, "full", learns=True) == 2
    assert shrink_batch(policy.network, 3, "full", learns=False) == 1


def test_a_cpu_takes_all_at_once_and_keeps_everything(policy):
    policy.device = torch.device("cpu")
    assert plan_update(policy, "auto", "auto", 4) == (4, 0)


NEEDS_OF_8_BLOCKS = [MemoryNeed(0, int(0.6 * GIB), 0.0), MemoryNeed(8, int(0.2 * GIB), 1.0)]


@pytest.mark.parametrize(
    ("kept_gib", "main_memory_gib", "plan", "kept_on"),
    [
        (1.0, 9.0, (3, 0), "cuda"),  # two gibibytes are left: three samples in place of four
        (2.5, 9.0, (4, 0), "cpu"),  # beside them blocks would be recomputed
        (4.0, 9.0, (4, 0), "cpu"),
        (4.0, 3.0, (4, 0), None),
    ],
)
def test_kept_states_stay_on_the_gpu_unless_blocks_would_be_recomputed_for_them(
    policy, monkeypatch, kept_gib, main_memory_gib, plan, kept_on
):
    monkeypatch.setattr(memory, "measure_needs", lambda *_: NEEDS_OF_8_BLOCKS)
    monkeypatch.setattr(memory, "bytes_of_kept_states", lambda *_: int(kept_gib * GIB))
    policy.network.trained_blocks = policy.network.num_blocks = 8
    rollout = RolloutSize(1, main_memory_gib * GIB)
    assert plan_update(policy, "auto", "auto", 4, rollout=rollout) == plan
    assert (policy.kept_on and policy.kept_on.type) == kept_on


WEIGHTS_GIB = 14.7  # of the 7B with its adapters
TASK = TaskInfo(0, "task", "pick up the bowl", 220, 50)
CONTEXT_GIB = 0.5  # of CUDA
CACHED_GIB = 2.6  # what the allocator keeps after a sample was measured


@dataclass(frozen=True)
class Card:
    """A GPU on which the 7B has been loaded and measured, and what other programs have taken of it."""

    total_gib: float
    other_programs_gib: float = 0.0

    def plan(self, monkeypatch, budget_gib, num_envs):
        """(micro-batch size, number of recomputed blocks) of a run with official looks."""
        unused_gib = self.total_gib - CONTEXT_GIB - WEIGHTS_GIB - CACHED_GIB - self.other_programs_gib
        fractions = [1.0]
        for name, value in {
            "get_device_properties": SimpleNamespace(total_memory=int(self.total_gib * GIB)),
            "memory_allocated": int(WEIGHTS_GIB * GIB),
            "memory_reserved": int((WEIGHTS_GIB + CACHED_GIB) * GIB),
            "mem_get_info": (int(unused_gib * GIB), int(self.total_gib * GIB)),
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda x, _: fractions.append(x))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fractions[-1])
        policy = policy_on_gpu(monkeypatch)
        limit_memory(budget_gib, policy.device)
        gib_of_one = memory_of_simulator(SimulatorConfig(assets="official"), 1).gpu
        simulators = SimulatorCount(num_envs, "", num_envs * gib_of_one, 0.0)
        config = TrainConfig(update=UpdateConfig(batch_size=32))
        plan = plan_memory(policy, config, simulators, ALONE, TASK)
        return plan.micro_batch_size, policy.network.recomputed_blocks


def most_gib(plan):
    """What a plan takes of the GPU beside simulators, by the rules of vla/memory.py."""
    size, recomputed_blocks = plan
    sample_bytes = np.interp(recomputed_blocks, [0, 49, 81], [need.bytes for need in NEEDS])
    activations_gib = memory.GAPS_FACTOR * size * sample_bytes / GIB
    optimizer_gib = memory.COPIES_OF_TRAINABLE * ADAPTER_BYTES / GIB
    return CONTEXT_GIB + WEIGHTS_GIB + optimizer_gib + memory.MARGIN_BYTES / GIB + activations_gib


@pytest.mark.parametrize("num_envs", [1, 10])
@pytest.mark.parametrize("other_programs_gib", [0.0, 0.4])
@pytest.mark.parametrize("budget_gib", [None, 24])
def test_on_a_4090_the_plan_leaves_the_simulators_their_share(
    monkeypatch, budget_gib, other_programs_gib, num_envs
):
    plan = Card(23.6, other_programs_gib).plan(monkeypatch, budget_gib, num_envs)
    assert most_gib(plan) + other_programs_gib + num_envs * 0.55 <= 23.6
    assert plan == Card(23.6, other_programs_gib).plan(monkeypatch, None, num_envs)


def test_out_of_memory_halves_the_batch_then_recomputes_then_gives_up():
    can_recompute_more = iter([True, False])
    network = SimpleNamespace(recompute_everything=lambda: next(can_recompute_more), is_compiled=False)
    assert shrink_batch(network, 5, "full", learns=True) == 2
    assert shrink_batch(network, 2, "full", learns=True) == 1
    assert shrink_batch(network, 1, "full", learns=True) == 1  # now with recomputed activations
    with pytest.raises(BadInput, match="full"):
        shrink_batch(network, 1, "full", learns=True)
    with pytest.raises(BadInput, match="full"):
        shrink_batch(network, 1, "full", learns=False)
