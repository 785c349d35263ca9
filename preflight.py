"""From a configuration to a policy and a simulator, with every check that can be made before the first episode."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from configs.config import PolicyConfig, TaskConfig, TrainConfig
from envs.assets import describe_assets
from envs.libero import EnvSpec
from envs.tasks import TaskInfo
from errors import BadInput
from rl.checkpoints import TrainerState
from rl.run import Run
from vla.policy import Policy

log = logging.getLogger("train")

# Above this many bytes of weights a policy is not trained on a CPU unless --device cpu says so.
LARGE_CHECKPOINT_BYTES = 2 * 2**30


def choose_device(policy: PolicyConfig) -> torch.device:
    """The device that the policy runs on. Raises BadInput when it is missing or plainly too small."""
    if policy.checkpoint is None:
        raise BadInput("no public checkpoint is known for this suite: name a folder or a hub id with --checkpoint")
    has_gpu = torch.cuda.is_available()
    if policy.device == "cuda" and not has_gpu:
        raise BadInput("--device cuda: no CUDA GPU is visible to torch; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    if policy.device != "auto":
        return torch.device(policy.device)
    if has_gpu:
        return torch.device("cuda")
    folder = Path(policy.checkpoint)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else None
    looks_like_a_path = folder.is_absolute() or policy.checkpoint.startswith((".", "checkpoints/"))
    if (size is None and not looks_like_a_path) or (size is not None and size > LARGE_CHECKPOINT_BYTES):
        raise BadInput(
            f"{policy.checkpoint} is a 7B policy and needs a CUDA GPU of 24 GB, but torch {torch.__version__} sees "
            "none; on this machine `make demo` trains a small policy (to force the CPU: --device cpu)"
        )
    return torch.device("cpu")


def choose_dtype(policy: PolicyConfig, device: torch.device) -> torch.dtype:
    """Precision of the frozen weights."""
    if policy.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[policy.dtype]


def check_init_states(task: TaskConfig, tasks: list[TaskInfo]) -> None:
    """Raise BadInput when a task has fewer initial states than the configuration uses."""
    needed = max(task.train_init_states[1], task.eval_init_states[1])
    for info in tasks:
        if info.num_init_states < needed:
            raise BadInput(
                f"task {info.task_id} ({info.name}) has {info.num_init_states} initial states, but {needed} are needed "
                f"for --train-init-states {task.train_init_states} and --eval-init-states {task.eval_init_states}"
            )


def choose_teacher(config: TrainConfig, has_l1_head: bool) -> tuple[str, str]:
    """How the teacher decides (`greedy` or `l1`), and why in words (SPEC section 2). Raises BadInput."""
    wanted, checkpoint = config.policy.teacher, config.policy.checkpoint
    if wanted == "l1" and not has_l1_head:
        raise BadInput(f"--teacher l1: {checkpoint} ships no action head; use --teacher greedy")
    if wanted == "auto":
        mode = "l1" if has_l1_head else "greedy"
        why = (
            "the checkpoint ships an action head: it was trained by regression, its token logits mean nothing"
            if has_l1_head
            else "the checkpoint has no action head: its token logits were trained"
        )
    else:
        mode, why = wanted, "as asked by --teacher"
    if mode == "l1" and (config.phases.distill_target == "sharpened" or config.loss.kl_coef > 0):
        raise BadInput(
            "--distill-target sharpened and --kl-coef need the teacher's token distribution, but the teacher is the L1 "
            "head, which has none; leave them out or use --teacher greedy"
        )
    return mode, why


def load_policy(config: TrainConfig) -> Policy:
    """The pretrained policy with fresh adapters on its device. Raises BadInput."""
    device = choose_device(config.policy)
    return Policy.load(
        config.policy.checkpoint,
        task_suite=config.task.task_suite,
        unnorm_key=config.policy.unnorm_key,
        device=device,
        dtype=choose_dtype(config.policy, device),
        lora_rank=config.policy.lora_rank,
        lora_alpha=config.policy.lora_alpha,
        seed=config.run.seed,
        gradient_checkpointing=config.policy.gradient_checkpointing,
    )


def env_spec(task: TaskConfig, num_images: int) -> EnvSpec:
    """The simulator's recipe: the configured tasks, with the cameras that the policy reads."""
    return EnvSpec(
        task_suite=task.task_suite,
        task_ids=task.task_ids,
        num_images=num_images,
        assets=task.assets or os.environ.get("LIBERO_ASSETS") or "lowpoly",
        bddl_file=task.bddl_file,
        max_env_steps=task.max_env_steps,
    )


def log_setup(
    run: Run, policy: Policy, spec: EnvSpec, tasks: list[TaskInfo], teacher: tuple[str, str], state: TrainerState
) -> None:
    """Say what is about to run: policy, teacher, tasks, looks, folder."""
    mode, why = teacher
    rows = [
        *policy.describe(),
        ("teacher", f"{mode}: {why}"),
        *((f"task {task.task_id}", f"{task.instruction} (at most {task.max_env_steps} env steps)") for task in tasks),
        ("assets", describe_assets(spec.assets)),
        ("run folder", str(run.folder)),
    ]
    if state.update:
        rows.append(("resumed", f"at env step {state.global_step}, after {state.update} updates"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        log.info("%s  %s", name.ljust(width), value)
