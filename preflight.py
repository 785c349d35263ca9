"""The checks before the first episode: each finding is one sentence, with what repairs it where that is needed.

A training run makes them and stops at the first failure. `--check-only` makes them and some slower ones, also those
that a failure before them leaves possible, and shows all findings.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import torch

from assembly import Teacher, choose_device, choose_teacher, env_spec, fit_to_memory, load_policy
from checks import (
    check_disk,
    check_frame,
    check_host_memory,
    check_init_states,
    check_installed,
    check_looks,
    check_memory,
    check_physics,
    check_rendering,
    check_replicas,
    check_statistics,
    check_suite,
    check_wandb,
    describe_checkpoint,
    describe_device,
    first_observation,
)
from configs.config import TrainConfig
from envs.assets import describe_assets
from envs.libero import EnvSpec, task_info
from envs.pool import WorkerPool
from envs.tasks import TaskInfo
from findings import Checks
from rl.contracts import Observation, Pool
from rl.never_fatal import never_fatal
from rl.ranks import ALONE, join_ranks
from rl.selfcheck import check_learning, check_logits_path
from vla.checkpoint import CheckpointInfo, base_and_adapter, inspect_checkpoint, resolve_checkpoint
from vla.policy import Policy
from vla.probes import action_mass_probe, attention_probe, image_probe, synthetic_observations

log = logging.getLogger("train")
FIRST_FRAME_S = 120.0  # until --check-only gives the simulator up


def check_machine(checks: Checks, config: TrainConfig) -> torch.device | None:
    """What can be checked before the policy is loaded; returns the device that it will run on."""
    checks.make("versions", check_installed)
    device = checks.obtain("device", lambda: choose_device(config.policy), describe_device)
    checks.make("rendering", lambda: check_rendering(torch.cuda.is_available()))
    checks.make("host memory", lambda: check_host_memory(config.simulator.num_envs))
    checks.make("wandb", lambda: check_wandb(config.run.wandb_mode))
    return device


def check_setup(checks: Checks, config: TrainConfig, policy: Policy, pool: Pool, tasks: list[TaskInfo]) -> Observation:
    """Check policy and simulator; returns the first observation of the first task. Raises the first failure."""
    checks.make("checkpoint", lambda: describe_checkpoint(policy.info))
    check_belonging(checks, config, policy.info)
    checks.make("disk", lambda: check_disk(config.run, policy))
    checks.make("initial states", lambda: check_init_states(config.task, tasks))
    observation = checks.obtain(
        "first frame", lambda: first_observation(pool, *first_episode(config, tasks)), check_frame
    )
    assert observation is not None, "a run raises its first failure"
    check_policy(checks, config, policy, observation, config.update.micro_batch)
    return observation


def check_only(config: TrainConfig) -> None:
    """Make all checks and print a line for each. Raises BadInput when one has failed."""
    checks = Checks(show_all=True, silent=os.environ.get("RANK", "0") != "0")
    device = check_machine(checks, config)
    can_simulate = checks.passed("versions", "rendering")
    ranks = ALONE if device is None else join_ranks(device)
    info = checks.obtain("checkpoint", inspect, describe_checkpoint, config.model.checkpoint)
    check_belonging(checks, config, info)
    checks.make("teacher", lambda info: ": ".join(choose_teacher(config, info.has_l1_head)), info)
    policy = checks.obtain(
        "weights", lambda *_: load_policy(config, ranks), describe_weights, device, checks.passed("statistics")
    )
    micro_batch_size = checks.obtain(
        "micro-batch", lambda policy: fit_to_memory(config, policy, ranks).update.micro_batch,
        lambda size: f"{size} decisions at a time", policy,
    )  # fmt: skip
    checks.make("disk", lambda: check_disk(config.run, policy))
    checks.make("physics", lambda _: check_physics(), can_simulate)

    spec = checks.obtain("tasks", lambda: env_spec(config.task, info.num_images if info else 1), describe_tasks)
    tasks = None if spec is None else task_info(spec)
    checks.make("initial states", lambda tasks: check_init_states(config.task, tasks), tasks)
    observation = checks.obtain(
        "first frame", lambda spec, _: observe_apart(config, spec), check_frame, spec, can_simulate
    )
    check_policy(checks, config, policy, observation, micro_batch_size)
    checks.conclude()
    ranks.leave()


def check_belonging(checks: Checks, config: TrainConfig, info: CheckpointInfo | None) -> None:
    """Whether the checkpoint is one of the suite, by its statistics and its name, and of what will be seen."""
    suite, unnorm_key = config.task.task_suite, config.model.unnorm_key
    checks.make("statistics", lambda info: check_statistics(info, suite, unnorm_key), info)
    checks.make("suite", lambda _, name: check_suite(name_of(name), suite), info, config.model.checkpoint)
    checks.make("looks", lambda info: check_looks(info, config.simulator.assets), info)


def check_policy(
    checks: Checks,
    config: TrainConfig,
    policy: Policy | None,
    observation: Observation | None,
    micro_batch_size: int | None,
) -> None:
    """Ask the policy what no error message would ever tell (`vla.probes`), and make one backward pass."""
    seen, temperature = observation, config.rollout.temperature
    if policy is not None and observation is None:
        (seen,) = synthetic_observations(policy, count=1)
    checks.make("attention", lambda policy: attention_probe(policy), policy)
    checks.make("images", lambda policy: image_probe(policy), policy)
    checks.make(
        "token head", lambda policy, seen: action_mass_probe(policy, seen, needs_token_head(config, policy)),
        policy, observation,
    )  # fmt: skip
    checks.make(
        "log-probs", lambda policy, seen: check_logits_path(policy, seen, temperature, policy.dtype), policy, seen
    )
    checks.make(
        "memory", lambda policy, seen, size: check_memory(policy, seen, size, config.simulator.num_envs),
        policy, seen, micro_batch_size,
    )  # fmt: skip
    checks.make(
        "learning", lambda policy, seen, _: check_learning(policy, [seen] * len(policy.devices)),
        policy, seen, checks.passed("memory"),
    )  # fmt: skip
    if policy is not None and len(policy.devices) > 1:
        checks.make("replicas", check_replicas, policy)


def needs_token_head(config: TrainConfig, policy: Policy) -> bool:
    """Whether the run starts from the checkpoint's token logits; after an L1 teacher's warmup it does not."""
    has_l1_teacher = policy.action_head is not None and config.phases.teacher != "greedy"
    return not (config.evaluation.allow_zero_baseline or (has_l1_teacher and config.phases.warmup))


def first_episode(config: TrainConfig, tasks: list[TaskInfo]) -> tuple[int, int]:
    """Task id and initial state."""
    return tasks[0].task_id, config.task.train_init_states[0]


def observe_apart(config: TrainConfig, spec: EnvSpec) -> Observation:
    """The first observation, from a process of its own: a simulator that hangs or crashes is a finding, too."""
    with WorkerPool(spec, 1, build_timeout_s=FIRST_FRAME_S) as pool:
        return first_observation(pool, *first_episode(config, task_info(spec)))


def inspect(checkpoint: str) -> CheckpointInfo:
    """What a checkpoint is, from its small files and headers."""
    base, _ = base_and_adapter(checkpoint, None)
    return inspect_checkpoint(resolve_checkpoint(base))


def name_of(checkpoint: str) -> str:
    """The last part of the base's hub id or folder."""
    base, _ = base_and_adapter(checkpoint, None)
    folder = Path(base).expanduser()
    return (folder.resolve() if folder.is_dir() else folder).name


def describe_weights(policy: Policy) -> str:
    rows = dict(policy.describe())
    return f"{rows['parameters']}; trainable {rows['trainable']}; on {rows['devices']}"


def describe_tasks(spec: EnvSpec) -> str:
    return "; ".join(f"{task.task_id} {task.instruction}" for task in task_info(spec))


def save_model_view(path: Path, observation: Observation, policy: Policy) -> None:
    """Write the images as the network sees them: after JPEG, resize and crop."""
    with never_fatal(f"{path.name} could not be written"):
        imageio.imwrite(path, np.concatenate(list(policy.view(observation)), axis=1))


def log_setup(
    config: TrainConfig, policy: Policy, spec: EnvSpec, tasks: list[TaskInfo], teacher: Teacher, folder: Path,
    checks: Checks,
) -> None:  # fmt: skip
    """Say what is about to run: policy, teacher, tasks, looks, folder, and what the checks have found."""
    rows = [
        *policy.describe(),
        (
            "update",
            f"{config.update.batch_size} decisions a step, {config.update.micro_batch} at a time on each device",
        ),
        ("teacher", f"{teacher.mode}: {teacher.why}"),
        *((f"task {task.task_id}", f"{task.instruction} (at most {task.max_env_steps} env steps)") for task in tasks),
        ("assets", describe_assets(spec.assets)),
        ("run folder", str(folder)),
        ("checks", checks.summary()),
        *(("warning", f"{finding.check}: {finding.text}") for finding in checks.warnings()),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        log.info("%s  %s", name.ljust(width), value)
