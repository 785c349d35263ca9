"""The checks before the first episode: each failure is one sentence with what was found and what repairs it.

`--check-only` runs them alone and shows all findings; a training run makes them first and stops at the first failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from assembly import Teacher
from configs.config import TaskConfig, TrainConfig
from envs.assets import describe_assets
from envs.libero import EnvSpec
from envs.tasks import TaskInfo
from errors import BadInput
from rl.contracts import Observation, Pool
from rl.never_fatal import never_fatal
from rl.selfcheck import SelfCheckError, check_logits_path
from vla.policy import Policy
from vla.probes import action_mass_probe, attention_probe, image_probe

log = logging.getLogger("train")
MIN_CONTRAST = 5.0  # standard deviation of a frame's pixel values, 0..255; an empty frame has none


def check_setup(
    config: TrainConfig, policy: Policy, pool: Pool, tasks: list[TaskInfo], show_all: bool = False
) -> Observation:
    """Run all checks and return the first observation of the first task.

    Raises BadInput or SelfCheckError at the first failure; with `show_all` only after a table of all findings.
    """
    check_init_states(config.task, tasks)
    observation = first_observation(pool, tasks[0].task_id, config.task.train_init_states[0])
    checks: dict[str, Callable[[], str]] = {
        "device": lambda: describe_device(policy.device),
        "rendering": lambda: check_frame(observation),
        "attention": lambda: attention_probe(policy),
        "images": lambda: image_probe(policy),
        "token head": lambda: action_mass_probe(policy, observation, must_be_trained=needs_token_head(config, policy)),
        "log-probs": lambda: check_logits_path(policy, observation, config.policy.temperature, policy.dtype),
        "memory": lambda: check_memory(policy, observation, config.update.micro_batch),
    }
    if len(policy.devices) > 1:
        checks["replicas"] = lambda: check_replicas(policy)
    failures = []
    table = Table("check", "finding", title="preflight")
    for name, check in checks.items():
        try:
            table.add_row(name, check(), style="green")
        except (BadInput, SelfCheckError) as failure:
            if not show_all:
                raise
            failures.append(failure)
            table.add_row(name, str(failure), style="red")
    if show_all:
        Console().print(table)
    if failures:
        raise failures[0]
    return observation


def needs_token_head(config: TrainConfig, policy: Policy) -> bool:
    """Whether the run starts from the checkpoint's token logits; after an L1 teacher's warmup it does not."""
    has_l1_teacher = policy.action_head is not None and config.policy.teacher != "greedy"
    return not (config.evaluation.allow_zero_baseline or (has_l1_teacher and config.phases.warmup))


def check_init_states(task: TaskConfig, tasks: list[TaskInfo]) -> None:
    """Raise BadInput when a task has fewer initial states than the configuration uses."""
    needed = max(task.train_init_states[1], task.eval_init_states[1])
    for info in tasks:
        if info.num_init_states < needed:
            raise BadInput(
                f"task {info.task_id} ({info.name}) has {info.num_init_states} initial states, but {needed} are needed "
                f"for --train-init-states {task.train_init_states} and --eval-init-states {task.eval_init_states}"
            )


def first_observation(pool: Pool, task_id: int, init_state_id: int) -> Observation:
    """The first observation of an episode. Raises BadInput when the simulator cannot give one."""
    pool.reset(0, task_id, init_state_id)
    ((_, result),) = pool.ready()
    if result.error is not None:
        raise BadInput(f"the simulator failed at its first reset (task {task_id}): {result.error}")
    assert result.observation is not None, "a reset without an error brings an observation"
    return result.observation


def describe_device(device: torch.device) -> str:
    """Name and memory of the device. Raises BadInput when this torch has no code for it."""
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    if not any(arch.endswith((f"_{major}{minor}", f"_{major}0")) for arch in built_for):
        raise BadInput(
            f"torch {torch.__version__} has no code for this GPU (compute capability {major}.{minor}; it was built for "
            f"{', '.join(built_for)}): install a torch that has"
        )
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB"


def check_frame(observation: Observation) -> str:
    """The rendered frames show something."""
    contrast = [float(image.std()) for image in observation.images]
    if min(contrast) < MIN_CONTRAST:
        raise BadInput(
            f"a rendered frame is empty (standard deviation of its pixels: {min(contrast):.1f}): check the GL driver "
            "and MUJOCO_GL, or --assets"
        )
    size = " x ".join(str(n) for n in observation.images.shape[1:3])
    return f"{len(observation.images)} cameras of {size} pixels"


def check_replicas(policy: Policy) -> str:
    """What one device writes into another's memory arrives: some mainboards garble copies between GPUs."""
    if policy.replicas is not None and not policy.replicas.are_equal():
        raise BadInput(
            "copies between the GPUs of this machine do not arrive: switch off its IOMMU (or ACS) in the BIOS, or "
            "leave out --data-parallel"
        )
    return f"{len(policy.devices)} devices have the same trainable parameters"


def check_memory(policy: Policy, observation: Observation, micro_batch_size: int) -> str:
    """One forward and backward pass of a micro-batch per device, the largest thing that happens. Raises BadInput."""
    on_gpu = policy.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(policy.device)
    try:
        policy.chunk_logits([observation] * micro_batch_size * len(policy.devices)).sum().backward()
        policy.reduce_gradients()
    except torch.OutOfMemoryError as error:
        raise BadInput(
            f"out of GPU memory in one update of {micro_batch_size} decisions ({str(error).splitlines()[0]}); lower "
            "--micro-batch-size, keep --gradient-checkpointing on, or lower --lora-rank"
        ) from None
    trained = [parameter for _, parameter in policy.named_trainable_parameters()]
    reached = sum(parameter.grad is not None for parameter in trained)
    for parameter in trained:
        parameter.grad = None
    if reached == 0:
        raise SelfCheckError("no gradient reaches the adapters: the policy cannot learn")
    if not on_gpu:
        return f"a backward pass reaches {reached} of {len(trained)} trainable tensors"
    peak = torch.cuda.max_memory_allocated(policy.device) / 2**30
    return f"peak of an update {peak:.1f} GiB; a backward pass reaches {reached} of {len(trained)} trainable tensors"


def save_model_view(path: Path, observation: Observation, policy: Policy) -> None:
    """Write the images as the network sees them: after JPEG, resize and crop."""
    with never_fatal(f"{path.name} could not be written"):
        imageio.imwrite(path, np.concatenate(list(policy.view(observation)), axis=1))


def log_setup(policy: Policy, spec: EnvSpec, tasks: list[TaskInfo], teacher: Teacher, folder: Path) -> None:
    """Say what is about to run: policy, teacher, tasks, looks, folder."""
    rows = [
        *policy.describe(),
        ("teacher", f"{teacher.mode}: {teacher.why}"),
        *((f"task {task.task_id}", f"{task.instruction} (at most {task.max_env_steps} env steps)") for task in tasks),
        ("assets", describe_assets(spec.assets)),
        ("run folder", str(folder)),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        log.info("%s  %s", name.ljust(width), value)
