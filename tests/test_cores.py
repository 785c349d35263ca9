"""The CPU is shared between network and simulators."""

import torch

from rl.cores import cores_for_simulators


def test_a_network_on_the_cpu_leaves_the_cores_to_the_simulators_and_takes_them_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for device, num_envs, during in (("cpu", 1000, 1), ("cpu", 1, 2), ("cuda", 1000, 2)):
            with cores_for_simulators(torch.device(device), num_envs):
                assert torch.get_num_threads() == during
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
