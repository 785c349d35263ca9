"""What goes to a device: without a wait where there is one to wait for, without a copy where there is none."""

import torch

from transfer import send


def test_a_gpu_gets_pinned_memory_and_is_not_waited_for():
    sent = send(_OnItsWay(), torch.device("cuda", 1))
    assert sent == ("pinned", torch.device("cuda", 1), True)


def test_on_a_cpu_a_tensor_stays_where_it_is():
    tensor = torch.arange(3)
    assert send(tensor, torch.device("cpu")) is tensor


class _OnItsWay:
    """Stands for a tensor where there is no GPU: tells how it was sent."""

    memory = "pageable"

    def pin_memory(self) -> "_OnItsWay":
        self.memory = "pinned"
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> tuple[str, torch.device, bool]:
        return self.memory, device, non_blocking
