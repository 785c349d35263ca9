"""`--num-envs auto`: as many simulators as cores and memory allow and as are of use; and the memory that one takes."""

import os
import signal

import pytest
import torch

from configs.config import TrainConfig, changed
from configs.sections import SimulatorConfig
from contracts import BadInput
from envs.env import TaskInfo
from experiment import simulators
from experiment.simulators import SimulatorCount, count_for_training, count_simulators, find_renderer_apart
from rl.ranks import Ranks

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")
NVIDIA = "EGL device 0: NVIDIA GeForce RTX 4090/PCIe (NVIDIA Corporation)"
MESA = "EGL device 0: llvmpipe (LLVM 15.0.6, 256 bits) (Mesa/X.org)"
OFFICIAL = SimulatorConfig(assets="official")


@pytest.fixture
def machine(monkeypatch):
    """Sets the machine: its cores, its free main memory and the free memory of its GPU, in GiB."""

    def set_machine(cores: int, main: float = 1000.0, gpu: float = 1000.0) -> None:
        monkeypatch.setattr(simulators, "usable_cores", lambda: cores)
        monkeypatch.setattr(simulators, "free_main_memory", lambda: main)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(gpu * 2**30), 80 * 2**30))

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return set_machine


@pytest.mark.parametrize(
    ("ranks", "cores", "main", "gpu", "device", "renderer", "num_envs"),
    [
        (1, 16, 1000, 1000, CPU, MESA, 17),  # one more beside a policy on the CPU
        (1, 16, 12, 1000, GPU, NVIDIA, 5),  # half of the free memory, 1.2 GiB each
        (1, 16, 1000, 8.4, GPU, NVIDIA, 7),  # a card of 24 GB with the 7B; 0.55 GiB each
        (1, 16, 1, 0.1, GPU, NVIDIA, 1),  # fewer there cannot be; a warning says so
        (1, 16, 1000, 1.1, GPU, MESA, 16),  # GPU memory counts only where simulators render on the GPU
        (4, 16, 1000, 1000, GPU, NVIDIA, 4),  # ranks share cores and main memory
        (4, 64, 1000, 8.4, GPU, NVIDIA, 7),  # but not their GPUs
    ],
)
def test_there_are_as_many_as_cores_and_half_of_the_free_memory_allow(
    machine, monkeypatch, ranks, cores, main, gpu, device, renderer, num_envs
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    machine(cores, main, gpu)
    count = count_simulators(OFFICIAL, 1, device, renderer, useful=1000)
    on_gpu = device == GPU and renderer == NVIDIA
    assert (count.num_envs, count.gpu_gib) == (num_envs, pytest.approx(0.55 * num_envs if on_gpu else 0.0))


def test_a_number_is_kept_whatever_the_machine_is(machine):
    machine(cores=2, main=1.0)
    config = SimulatorConfig(num_envs=8, assets="official")
    assert count_simulators(config, 1, CPU, MESA, useful=1).num_envs == 8


def crash():
    """As a broken GL driver does."""
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_machine_that_cannot_render_is_refused(monkeypatch):
    monkeypatch.setattr(simulators, "find_renderer", crash)
    with pytest.raises(BadInput):
        find_renderer_apart("processes")


def test_with_ray_the_policys_machine_need_not_render_and_its_gpu_is_not_planned_for(machine, monkeypatch):
    machine(cores=2)
    monkeypatch.setattr(simulators, "find_renderer", crash)
    config = SimulatorConfig(num_envs=8, simulators="ray")
    count = count_simulators(config, 1, GPU, find_renderer_apart("ray"), useful=8)
    assert (count.num_envs, count.gpu_gib) == (8, 0.0)


class TwoRanks(Ranks):
    """Rank 0 of two; the other one has room for three simulators."""

    def gather(self, value: SimulatorCount) -> list[SimulatorCount]:
        return [value, SimulatorCount(3, "3 simulator(s)", 5.0, 1.0)]


def test_a_training_has_no_more_than_its_rollouts_can_use_and_the_same_number_on_all_ranks(machine):
    machine(cores=64)
    tasks = [TaskInfo(task_id, "", "", max_env_steps, 50) for task_id, max_env_steps in ((0, 100), (1, 220))]
    config = changed(TrainConfig(), assets="lowpoly", n_steps=3_000, task_ids=(0, 1))
    alone = count_for_training(config, tasks, GPU, NVIDIA)
    assert alone.num_envs == 14  # 13 episodes of 220 env steps are fewer than 3,000
    assert count_for_training(changed(config, group_size=16), tasks, GPU, NVIDIA).num_envs == 16
    of_two = count_for_training(config, tasks, GPU, NVIDIA, TwoRanks(0, 2))
    assert (of_two.num_envs, of_two.gpu_gib, of_two.left_gib) == (3, 5.0, 1.0)
