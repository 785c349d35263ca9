"""What an update recomputes, how large its micro-batch is, and what happens when memory runs out nevertheless.

Measuring what a sample needs takes a GPU. Here it is given.
"""

from types import SimpleNamespace

import pytest
import torch

from contracts import BadInput
from vla import memory
from vla.memory import GIB, MemoryNeed, choose_plan, fit_to_memory, shrink_batch

# Measured on an H200, 7B, two images, bfloat16 (docs/RESULTS.md).
NEEDS = [
    MemoryNeed(0, int(2.58 * GIB), 0.0),
    MemoryNeed(49, int(2.09 * GIB), 0.1),
    MemoryNeed(81, int(0.38 * GIB), 1.0),
]


def test_nothing_is_recomputed_where_everything_fits_and_everything_where_only_that_does():
    assert choose_plan(NEEDS, 6 * GIB, range(1, 3)) == (2, 0)
    assert choose_plan(NEEDS, 0.38 * GIB, range(1, 3)) == (1, 81)


@pytest.mark.parametrize("free_gib", [0.4, 1.0, 2.0, 2.2, 3.0, 4.0, 5.0, 7.3, 15.0])
def test_every_plan_fits_by_its_own_measure(free_gib):
    micro_batch_size, recomputed_blocks = choose_plan(NEEDS, free_gib * GIB, range(1, 9))
    below = [need for need in NEEDS if need.recomputed_blocks <= recomputed_blocks][-1]
    above = next(need for need in NEEDS if need.recomputed_blocks >= recomputed_blocks)
    distance = above.recomputed_blocks - below.recomputed_blocks
    part = (recomputed_blocks - below.recomputed_blocks) / distance if distance else 0
    bytes_per_sample = below.bytes + part * (above.bytes - below.bytes)
    assert micro_batch_size * bytes_per_sample <= free_gib * GIB


def test_a_gpu_that_is_too_small_is_refused_with_what_is_missing():
    with pytest.raises(BadInput, match=r"needs 0\.4 GiB .* 0\.2 GiB are left"):
        choose_plan(NEEDS, 0.2 * GIB, range(1, 3))


@pytest.fixture
def policy(monkeypatch):
    """On a GPU where 3 GiB are free, and a sample needs NEEDS."""
    monkeypatch.setattr(memory, "measure_needs", lambda *_: NEEDS)
    monkeypatch.setattr(memory, "free_for_activations", lambda _, reserved_bytes: 3 * GIB - reserved_bytes)
    return SimpleNamespace(
        device=torch.device("cuda"),
        network=SimpleNamespace(num_blocks=81, recomputed_blocks=0),
        num_images=1,
        statistics=SimpleNamespace(proprio=None),
    )


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
    assert fit_to_memory(policy, checkpointing, micro_batch_size, most_decisions) == expected_size
    assert policy.network.recomputed_blocks == expected_blocks


def test_what_other_processes_are_going_to_take_is_left_to_them(policy):
    with pytest.raises(BadInput, match=r"0\.2 GiB are left"):
        fit_to_memory(policy, "auto", "auto", 4, reserved_bytes=2.8 * GIB)


def test_a_cpu_takes_all_at_once_and_keeps_everything(policy):
    policy.device = torch.device("cpu")
    assert fit_to_memory(policy, "auto", "auto", 4) == 4
    assert policy.network.recomputed_blocks == 0


def test_out_of_memory_halves_the_batch_then_recomputes_then_gives_up():
    can_recompute_more = iter([True, False])
    policy = SimpleNamespace(recompute_everything=lambda: next(can_recompute_more))
    assert shrink_batch(policy, 5, "full", is_update=True) == 2
    assert shrink_batch(policy, 2, "full", is_update=True) == 1
    assert shrink_batch(policy, 1, "full", is_update=True) == 1  # now with recomputed activations
    with pytest.raises(BadInput, match="--micro-batch-size 1"):
        shrink_batch(policy, 1, "full", is_update=True)
    with pytest.raises(BadInput, match="--max-batch 1"):
        shrink_batch(policy, 1, "full", is_update=False)
