"""What an update recomputes, how large its micro-batch is, and what happens when memory runs out nevertheless.

Measuring what a sample needs takes a GPU. Here it is given.
"""

from types import SimpleNamespace

import pytest
import torch

from contracts import GIB, BadInput
from vla import memory
from vla.memory import MemoryNeed, RolloutSize, choose_plan, plan_update
from vla.pass_sizes import shrink_until_it_fits

# Measured on an H200, 7B, two images, bfloat16 (docs/RESULTS.md).
NEEDS = [
    MemoryNeed(0, int(2.58 * GIB), 0.0),
    MemoryNeed(49, int(2.09 * GIB), 0.1),
    MemoryNeed(81, int(0.38 * GIB), 1.0),
]
ADAPTER_BYTES = int(0.2 * GIB)


def test_all_is_recomputed_where_only_that_fits_and_an_update_that_does_not_fit_is_refused():
    assert choose_plan(NEEDS, 0.38 * GIB, range(1, 3)) == (1, 81)
    with pytest.raises(BadInput, match="GiB are left"):
        choose_plan(NEEDS, 0.2 * GIB, range(1, 3))


def policy_on_gpu(monkeypatch):
    """A policy of which a sample needs NEEDS."""
    monkeypatch.setattr(memory, "measure_needs", lambda *_: NEEDS)
    adapters = torch.zeros(ADAPTER_BYTES // 4, device="meta")
    return SimpleNamespace(
        device=torch.device("cuda", 0),
        network=SimpleNamespace(
            num_blocks=81, recomputed_blocks=0, largest_batches={}, is_compiled=False, trained_blocks=None
        ),
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
    ("micro_batch_size", "most_decisions", "plan"), [("auto", 1, (1, 0)), (2, 4, (1, 0)), (1, 4, (1, 0))]
)
def test_the_fastest_plan_of_at_most_the_flags_size_is_chosen(policy, micro_batch_size, most_decisions, plan):
    assert plan_update(policy, micro_batch_size, most_decisions) == plan
    policy.device = torch.device("cpu")  # takes all at once and keeps everything
    assert plan_update(policy, "auto", 4) == (4, 0)


@pytest.mark.parametrize("micro_batch_size", ["auto", 1])
def test_a_compiled_network_learns_from_two_decisions_at_least(policy, micro_batch_size):
    """It would compute a single one twice."""
    policy.network.is_compiled = True
    assert plan_update(policy, micro_batch_size, 1).micro_batch_size == 2
    assert sizes_tried(policy.network, 3, learns=True) == [3, 2, 2]
    assert sizes_tried(policy.network, 3, learns=False) == [3, 1]


NEEDS_OF_8_BLOCKS = [MemoryNeed(0, int(0.6 * GIB), 0.0), MemoryNeed(8, int(0.2 * GIB), 1.0)]


@pytest.mark.parametrize(
    ("kept_gib", "main_memory_gib", "plan", "kept_on"),
    [
        (1.0, 9.0, (3, 0), "cuda"),  # two gibibytes are left: three samples in place of four
        (2.5, 9.0, (4, 0), "cpu"),  # beside them blocks would be recomputed
        (4.0, 9.0, (4, 0), "cpu"),
        (4.0, 3.0, (4, 0), None),
        (3.0, 3.5, (4, 0), None),  # pinned they take four
    ],
)
def test_kept_states_stay_on_the_gpu_unless_blocks_would_be_recomputed_for_them(
    policy, monkeypatch, kept_gib, main_memory_gib, plan, kept_on
):
    monkeypatch.setattr(memory, "measure_needs", lambda *_: NEEDS_OF_8_BLOCKS)
    monkeypatch.setattr(memory, "bytes_of_kept_states", lambda *_: int(kept_gib * GIB))
    policy.network.trained_blocks = policy.network.num_blocks = 8
    rollout = RolloutSize(1, main_memory_gib * GIB)
    assert plan_update(policy, "auto", 4, rollout=rollout) == plan
    assert (policy.kept_on and policy.kept_on.type) == kept_on


@pytest.mark.parametrize(
    ("budget_share", "reserved_gib", "free_gib"),
    [
        (1.0, 0.0, 8.0),  # the GPU's free memory and what the allocator holds unused
        (1.0, 3.0, 5.0),  # simulators come later
        (0.75, 0.0, 4.0),  # 18 of 24 GiB, of which the weights have 14
        (0.75, 3.0, 4.0),  # the smaller limit counts
    ],
)
def test_budget_and_other_processes_limit_what_is_free(monkeypatch, budget_share, reserved_gib, free_gib):
    for name, value in {
        "get_device_properties": SimpleNamespace(total_memory=24 * GIB),
        "get_per_process_memory_fraction": budget_share,
        "memory_allocated": 14 * GIB,
        "memory_reserved": 16 * GIB,
        "mem_get_info": (6 * GIB, 24 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    left = memory.free_for_activations(policy_on_gpu(monkeypatch), reserved_gib * GIB)
    optimizer_and_margin = memory.COPIES_OF_TRAINABLE * ADAPTER_BYTES + memory.MARGIN_BYTES
    assert left * memory.GAPS_FACTOR + optimizer_and_margin == pytest.approx(free_gib * GIB, rel=1e-6)


def test_out_of_memory_halves_the_batch_then_recomputes_then_gives_up(policy):
    assert sizes_tried(policy.network, 5, learns=True) == [5, 2, 1, 1]  # the last with recomputed activations
    assert sizes_tried(policy.network, 5, learns=False) == [5, 2, 1]
    assert sizes_tried(policy.network, 5, learns=False) == [1]  # which later calls begin with


def sizes_tried(network, batch_size: int, learns: bool) -> list[int]:
    """The batch sizes that are tried, one after the other, where nothing fits."""
    can_recompute_more = iter([True, False])
    network.recompute_everything = lambda: next(can_recompute_more)
    sizes = []

    def compute(size):
        sizes.append(size)
        raise torch.OutOfMemoryError("full")

    with pytest.raises(BadInput, match="full"):
        shrink_until_it_fits(network, batch_size, compute, learns)
    return sizes
