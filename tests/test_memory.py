"""What an update recomputes and how large its micro-batch is, for given needs. Measuring them takes a GPU."""

from types import SimpleNamespace

import pytest
import torch

from contracts import BadInput
from vla import memory
from vla.memory import GIB, MemoryNeed, choose_plan, fit_to_memory

# Measured on an H200, 7B, two images, bfloat16 (docs/RESULTS.md).
NEEDS = [
    MemoryNeed(0, int(2.58 * GIB), 0.0),
    MemoryNeed(49, int(2.09 * GIB), 0.1),
    MemoryNeed(81, int(0.38 * GIB), 1.0),
]


def test_nothing_is_recomputed_where_everything_fits_and_everything_where_only_that_does():
    assert choose_plan(NEEDS, 6 * GIB, range(1, 3)) == (2, 0)
    assert choose_plan(NEEDS, 0.38 * GIB, range(1, 3)) == (1, 81)


@pytest.mark.parametrize("free", [0.4, 1.0, 2.0, 2.2, 3.0, 4.0, 5.0, 7.3, 15.0])
def test_every_plan_fits_by_its_own_measure(free):
    micro_batch_size, block = choose_plan(NEEDS, free * GIB, range(1, 9))
    low, high = [n for n in NEEDS if n[0] <= block][-1], next(n for n in NEEDS if n[0] >= block)
    part = (
        0
        if low is high
        else (block - low.recomputed_blocks) / (high.recomputed_blocks - low.recomputed_blocks)
    )
    assert micro_batch_size * (low.bytes + part * (high.bytes - low.bytes)) <= free * GIB


def test_a_gpu_that_is_too_small_is_refused_with_what_is_missing():
    with pytest.raises(BadInput, match=r"needs 0\.4 GiB .* 0\.2 GiB are left"):
        choose_plan(NEEDS, 0.2 * GIB, range(1, 3))


@pytest.fixture
def policy(monkeypatch):
    """Of a GPU where 3 GiB are free, and a sample needs NEEDS."""
    monkeypatch.setattr(memory, "measure_needs", lambda *_: NEEDS)
    monkeypatch.setattr(memory, "free_for_activations", lambda _, reserved: 3 * GIB - reserved)
    network = SimpleNamespace(num_blocks=81, recomputed_blocks=0)
    statistics = SimpleNamespace(proprio=None)
    return SimpleNamespace(device=torch.device("cuda"), network=network, num_images=1, statistics=statistics)


@pytest.mark.parametrize(
    ("checkpointing", "micro_batch_size", "share", "expected"),
    [("auto", "auto", 1, (1, 0)), ("auto", 2, 4, (2, 61)), ("on", "auto", 4, (4, 81)), ("off", "auto", 4, (1, 0)),
     ("off", 4, 4, (4, 0))],
)  # fmt: skip
def test_flags_decide_and_auto_is_what_fits(policy, checkpointing, micro_batch_size, share, expected):
    assert fit_to_memory(policy, checkpointing, micro_batch_size, share) == expected[0]
    assert policy.network.recomputed_blocks == expected[1]


def test_what_others_are_going_to_take_is_left_to_them(policy):
    with pytest.raises(BadInput, match=r"0\.2 GiB are left"):
        fit_to_memory(policy, "auto", "auto", 4, reserved_bytes=2.8 * GIB)


def test_a_cpu_takes_all_at_once_and_keeps_everything(policy):
    policy.device = torch.device("cpu")
    assert fit_to_memory(policy, "auto", "auto", 4) == 4
    assert policy.network.recomputed_blocks == 0
