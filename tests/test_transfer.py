"""What goes to a device: without a wait where there is one to wait for, without a copy where there is none."""

import numpy as np
import pytest
import torch

from transfer import send


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float32])
def test_a_gpu_gets_a_copy_in_pinned_memory_and_is_not_waited_for(monkeypatch, dtype):
    monkeypatch.setattr(torch, "empty_like", lambda tensor, pin_memory: _OnItsWay(tensor, pin_memory))
    tensor = torch.arange(12).view(3, 4)[:, ::2].to(dtype)
    memory, device, waits, content = send(tensor, torch.device("cuda", 1))
    assert (memory, device, waits) == ("pinned", torch.device("cuda", 1), False)
    assert content.dtype == tensor.numpy().dtype
    assert np.array_equal(content, tensor.numpy())


def test_on_a_cpu_a_tensor_stays_where_it_is():
    tensor = torch.arange(3)
    assert send(tensor, torch.device("cpu")) is tensor


class _OnItsWay:
    """Stands for memory of a host with a GPU: tells how it was sent."""

    def __init__(self, tensor: torch.Tensor, pin_memory: bool):
        self.memory = "pinned" if pin_memory else "pageable"
        self.content = np.zeros(tuple(tensor.shape), tensor.numpy().dtype)

    def numpy(self) -> np.ndarray:
        return self.content

    def to(self, device: torch.device, non_blocking: bool = False) -> tuple[str, torch.device, bool, np.ndarray]:
        return self.memory, device, not non_blocking, self.content
