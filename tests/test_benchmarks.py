"""The programs in benchmarks/: what needs a GPU says so in one line; ballast on a GPU whose free memory is a number."""

import signal
from importlib import import_module

import pytest
import torch

from benchmarks.smaller_card import run_watched, take_ballast
from contracts import GIB, BadInput


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("gpu", ["--folder", "checkpoints/tiny-libero-spatial"]),
        ("smaller_card", ["23.5", "true"]),
        ("full_size", ["new"]),
    ],
)
def test_without_a_gpu_what_measures_one_is_refused(program, flags, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers would stay
    with pytest.raises(BadInput, match="torch sees no"):
        import_module(f"benchmarks.{program}").main(flags)


@pytest.fixture
def free_bytes(monkeypatch):
    """Free bytes of a GPU of 80 GiB, which the CUDA context and the ballast make less."""
    free = {0: 80 * GIB}

    def create_context(_, device):
        free[device.index] -= GIB // 2

    def allocate(size, dtype, device):
        free[device.index] -= size

    monkeypatch.setattr(torch, "zeros", create_context)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 * GIB))
    return free


def test_ballast_leaves_what_a_smaller_card_has(free_bytes):
    take_ballast(0, 23.5)
    assert free_bytes[0] == 23.5 * GIB
    with pytest.raises(BadInput, match=r"has only 23\.0"):
        take_ballast(0, 75)


def test_the_peak_is_what_falls_below_the_memory_at_the_start(monkeypatch):
    free = iter([20 * GIB, 20 * GIB, 4 * GIB])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free, 15 * GIB), 80 * GIB))
    assert run_watched(["sh", "-c", "sleep 0.2; exit 3"], [0]) == (3, {0: 16.0})
