"""Who gets the CPU: the network or the simulators."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cores_for_simulators(device: torch.device, num_envs: int) -> Iterator[None]:
    """While simulators run in processes of their own, a network on the CPU keeps to the cores that they leave.

    Its threads wait for one another actively; on cores that are taken, that is most of what they do.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu" and num_envs > 1:
        torch.set_num_threads(max(1, min(threads, (os.cpu_count() or 1) - num_envs)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
