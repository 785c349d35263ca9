"""Ballast on a large GPU, and the peak of what is left, with a GPU whose free memory is a number."""

import pytest
import torch

from benchmarks import smaller_card
from benchmarks.smaller_card import FreeMemory, take_ballast
from contracts import GIB, BadInput

CONTEXT_BYTES = int(0.5 * GIB)


@pytest.fixture
def free_bytes(monkeypatch):
    """Free bytes of two GPUs of 80 GiB, which the CUDA context and the ballast make less."""
    free = [80 * GIB, 70 * GIB]

    def create_context(_, device):
        free[device.index] -= CONTEXT_BYTES

    def allocate(size, dtype, device):
        free[device.index] -= size

    monkeypatch.setattr(torch, "zeros", create_context)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return free


def test_the_peak_is_what_falls_below_the_memory_that_was_left(free_bytes):
    take_ballast(0, 23.5)
    assert free_bytes == [23.5 * GIB, 70 * GIB]
    memory = FreeMemory(0)
    free_bytes[0] -= 20 * GIB
    memory.sample()
    free_bytes[0] += 5 * GIB
    memory.sample()
    assert "peak 20.00 of the 23.50 GiB" in memory.describe()


def test_more_than_is_free_cannot_be_left_free(free_bytes):
    with pytest.raises(BadInput, match=r"cuda:1 has only 69\.5"):
        smaller_card.main(["75", "true"])


def test_every_gpu_gets_ballast_and_the_commands_exit_code_is_passed_on(free_bytes, capsys):
    with pytest.raises(SystemExit) as stop:
        smaller_card.main(["23.5", "sh", "-c", "exit 3"])
    assert stop.value.code == 3
    assert free_bytes == [23.5 * GIB, 23.5 * GIB]
    assert "whole GPU 1: peak 0.00 of the 23.50 GiB" in capsys.readouterr().out
