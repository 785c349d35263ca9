"""Choose how many simulators run (`--num-envs auto`), from the machine's cores and memory and from what is to play."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from configs.config import TrainConfig
from configs.sections import SimulatorConfig
from contracts import GIB, BadInput
from envs.env import EnvSpec, TaskInfo
from envs.gl_backend import REPAIR, find_renderer, renders_in_software
from envs.machine import free_main_memory, usable_cores
from envs.pool import Simulators
from envs.worker import NoAnswer, ask
from experiment.terminal import log_row
from rl.ranks import ALONE, Ranks

# The share of the free memory that simulators may take, once the policy is loaded. The rest is for training and play.
SHARE_OF_FREE_MEMORY = 0.5


class SimulatorMemory(NamedTuple):
    """Memory that one simulator takes on this machine, in GiB."""

    main: float
    gpu: float


@dataclass(frozen=True)
class SimulatorCount:
    """How many simulators this process runs, why, and the memory that is left, in GiB."""

    num_envs: int
    reason: str
    gpu_gib: float  # that they need of the policy's GPU; 0 if they render elsewhere
    left_gib: float  # main memory that they leave to this rank


def find_renderer_apart(simulators: Simulators) -> str:
    """The name of the renderer, found by drawing a frame in another process. Raises BadInput if none can be drawn.

    With Ray nothing is tried: its workers draw, on this machine or on others.
    """
    if simulators == "ray":
        return "of Ray's workers"
    try:
        renderer = ask(find_renderer)
    except NoAnswer as reason:
        raise BadInput(
            f"no frame can be rendered ({reason}); {REPAIR}; or choose another device by MUJOCO_EGL_DEVICE_ID"
        ) from None
    if renders_in_software(renderer) and torch.cuda.is_available():
        log_row("warning", f"{renderer} renders on the CPU, slowly, although there is a GPU: {REPAIR}")
    return renderer


def memory_of_simulator(simulator: SimulatorConfig, kept_tasks: int) -> SimulatorMemory:
    """Estimate the memory that one simulator takes, which keeps `kept_tasks` tasks in memory.

    Measured GPU memory: 8 low-poly simulators of one task take 1.0 GiB, 15 official ones of one task 8.3 GiB, and 16
    official ones of 10 tasks 66 GiB.
    """
    if simulator.simulators != "processes":  # Ray chooses the machines
        return SimulatorMemory(0.0, 0.0)
    if simulator.assets == "lowpoly":
        return SimulatorMemory(main=0.3 + 0.2 * kept_tasks, gpu=0.13 * kept_tasks)
    return SimulatorMemory(main=0.6 + 0.6 * kept_tasks, gpu=0.15 + 0.4 * kept_tasks)


def count_for_training(
    config: TrainConfig, tasks: Sequence[TaskInfo], device: torch.device, renderer: str, ranks: Ranks = ALONE
) -> SimulatorCount:
    """How many simulators each rank of a training run has; all ranks get the smallest count, and least memory, of any.

    More simulators than a rollout has episodes, if all are as long as they may be, would only make rollouts longer than
    --n-steps; but each rank plays a whole group at least. The policy must have been loaded on `device`. renderer: what
    `find_renderer_apart` has found.
    """
    longest = max(task.max_env_steps for task in tasks)
    useful = max(config.rollout.group_size, math.ceil(config.rollout.n_steps / ranks.size / longest))
    kept_tasks = min(len(tasks), EnvSpec.kept_tasks)
    counts = ranks.gather(count_simulators(config.simulator, kept_tasks, device, renderer, useful, ranks))
    smallest = min(counts, key=lambda of_rank: of_rank.num_envs)
    num_envs = smallest.num_envs
    main_gib = memory_of_simulator(config.simulator, kept_tasks).main
    return replace(
        smallest,
        gpu_gib=num_envs * max(of_rank.gpu_gib / of_rank.num_envs for of_rank in counts),
        left_gib=min(of_rank.left_gib + main_gib * (of_rank.num_envs - num_envs) for of_rank in counts),
    )


def count_simulators(
    simulator: SimulatorConfig,
    kept_tasks: int,
    device: torch.device,
    renderer: str,
    useful: int,
    ranks: Ranks = ALONE,
) -> SimulatorCount:
    """How many simulators this process has: --num-envs, or for `auto` as many as all limits allow, at least one.

    kept_tasks: that each keeps in memory. useful: how many at most are of use for what is to play.
    """
    memory = memory_of_simulator(simulator, kept_tasks)
    gpu = device if device.type == "cuda" and not renders_in_software(renderer) else None
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free_gib = free_main_memory() / ranks_here
    if simulator.num_envs != "auto":
        limits = {"as configured (--num-envs)": simulator.num_envs}
    elif simulator.simulators == "ray":
        limits = limit_of_cluster(ranks) | {"more are of no use": useful}
    else:
        limits = limits_of_machine(memory, free_gib, ranks_here, device.type == "cpu", gpu)
        limits["more are of no use"] = useful
    reason = min(limits, key=lambda name: limits[name])
    num_envs = max(1, limits[reason])
    needed_gib = num_envs * memory.main
    if free_gib < needed_gib:
        text = f"{free_gib:.1f} GiB of main memory are free, simulators need about {needed_gib:.1f}"
        log_row("warning", f"{text}: lower --num-envs")
    gpu_gib = 0.0 if gpu is None else num_envs * memory.gpu
    return SimulatorCount(
        num_envs, f"{num_envs} simulator(s): {reason}", gpu_gib, max(0.0, free_gib - needed_gib)
    )


def limits_of_machine(
    memory: SimulatorMemory, free_gib: float, ranks_here: int, policy_on_cpu: bool, gpu: torch.device | None
) -> dict[str, int]:
    """What a rank's share of cores and memory allows, by its name. gpu: that of the policy, if it also renders.

    A policy on the CPU shares the cores: one more simulator than cores keeps them busy while it decides (measured in
    docs/RESULTS.md).
    """
    cores = max(1, usable_cores() // ranks_here)
    main_gib = SHARE_OF_FREE_MEMORY * free_gib
    limits = {
        f"{cores} core(s)": cores + 1 if policy_on_cpu else cores,
        f"half of the free main memory ({main_gib:.1f} GiB)": int(main_gib / memory.main),
    }
    if gpu is not None:
        gpu_gib = SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(gpu)[0] / GIB
        limits[f"half of the free GPU memory ({gpu_gib:.1f} GiB)"] = int(gpu_gib / memory.gpu)
    return limits


def limit_of_cluster(ranks: Ranks) -> dict[str, int]:
    """What the CPUs of the Ray cluster allow each rank."""
    from envs.ray_workers import connect  # it imports ray, which is optional

    cpus = connect()
    return {f"{cpus} CPUs of the Ray cluster": cpus // ranks.size}
