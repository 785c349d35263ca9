"""Ballast on a large GPU, and the peak of what is left, with a GPU whose free memory is a number."""

import pytest
import torch

from benchmarks import smaller_card
from benchmarks.smaller_card import GIB, smaller_gpus
from contracts import BadInput

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
    return free


def test_ballast_leaves_what_was_asked_for_and_the_peak_is_what_falls_below(free_bytes):
    with smaller_gpus(23.5, num_gpus=2) as records:
        assert free_bytes == [23.5 * GIB, 23.5 * GIB]
        free_bytes[0] -= 20 * GIB
        records[0].sample()
        free_bytes[0] += 5 * GIB
        records[0].sample()
    assert "peak 20.00 of the 23.50 GiB" in records[0].describe()
    assert "peak 0.00 of the 23.50 GiB" in records[1].describe()


def test_only_the_gpus_that_are_used_get_ballast(free_bytes):
    with smaller_gpus(23.5, num_gpus=1):
        assert free_bytes == [23.5 * GIB, 70 * GIB]


def test_more_than_is_free_cannot_be_left_free(free_bytes):
    with pytest.raises(BadInput, match=r"cuda:1 has only 69\.5"), smaller_gpus(75, num_gpus=2):
        pass


def test_the_commands_exit_code_is_passed_on(free_bytes, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as stop:
        smaller_card.main(["23.5", "sh", "-c", "exit 3"])
    assert stop.value.code == 3
    assert "whole GPU 0: peak 0.00 of the 23.50 GiB" in capsys.readouterr().out
