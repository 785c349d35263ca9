"""From a configuration to a policy, a teacher and a simulator's recipe."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from configs.config import PolicyConfig, TaskConfig, TrainConfig
from envs.libero import EnvSpec
from envs.rendering import GPU_BYTES_PER_RENDERER
from errors import BadInput
from rl.contracts import TeacherMode
from rl.ranks import ALONE, Ranks, own_gpu
from vla.adapter_folder import base_of_adapter
from vla.data_parallel import load_data_parallel
from vla.memory import MemoryPlan, choose_plan, free_for_activations, limit_memory, measure_needs
from vla.nf4 import NO_SHARDS
from vla.policy import Policy
from vla.probes import synthetic_observations

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
    if policy.device == "cpu":
        return torch.device("cpu")
    if has_gpu:
        return own_gpu()
    folder = Path(policy.checkpoint).expanduser()
    if (base := base_of_adapter(folder)) is not None:
        folder = Path(base).expanduser()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else None
    looks_like_a_path = folder.is_absolute() or policy.checkpoint.startswith((".", "checkpoints/"))
    if (size is None and not looks_like_a_path) or (size is not None and size > LARGE_CHECKPOINT_BYTES):
        raise BadInput(
            f"{policy.checkpoint} is a 7B policy and needs a CUDA GPU of 24 GB (less with --load-in-4bit), but torch "
            f"{torch.__version__} sees none; on this machine `make demo` trains a small policy (to force the CPU: "
            "--device cpu)"
        )
    return torch.device("cpu")


def choose_devices(policy: PolicyConfig) -> list[torch.device]:
    """`choose_device`, or with --data-parallel all visible GPUs. Raises BadInput."""
    device = choose_device(policy)
    if not policy.data_parallel:
        return [device]
    if device.type == "cpu" or torch.cuda.device_count() == 1:
        log.warning("--data-parallel: there is one device (%s), and the run goes on with it", device)
        return [device]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def choose_dtype(policy: PolicyConfig, device: torch.device) -> torch.dtype:
    """Precision of the frozen weights."""
    if policy.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[policy.dtype]


class Teacher(NamedTuple):
    mode: TeacherMode
    why: str


def choose_teacher(config: TrainConfig, has_l1_head: bool) -> Teacher:
    """How the teacher decides, and why in words (SPEC section 2). Raises BadInput."""
    wanted, checkpoint = config.policy.teacher, config.policy.checkpoint
    if wanted == "l1" and not has_l1_head:
        raise BadInput(f"--teacher l1: {checkpoint} ships no action head; use --teacher greedy")
    mode: TeacherMode
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
    return Teacher(mode, why)


def load_policy(config: TrainConfig, ranks: Ranks = ALONE) -> Policy:
    """The pretrained policy with fresh adapters on its devices, or its base spread over all ranks. Raises BadInput."""
    if ranks.size > 1 and config.policy.data_parallel:
        raise BadInput("--data-parallel is for one process, and here are several: leave it out of accelerate launch")
    if ranks.shard_base and config.policy.load_in_4bit:  # found here before gigabytes are read
        raise BadInput(NO_SHARDS)
    devices = choose_devices(config.policy)
    log.info("loading %s", config.policy.checkpoint)
    try:
        policy = _load_on(devices, config, ranks)
        if ranks.shard_base:
            limit_memory(config.policy.memory_budget, devices[0])
            policy.shard(devices[0])
    except torch.OutOfMemoryError as error:
        raise BadInput(
            f"out of GPU memory while loading {config.policy.checkpoint} ({str(error).splitlines()[0]}): close other "
            "programs on the GPU, raise --memory-budget, set --load-in-4bit, or use a GPU with more memory"
        ) from None
    return policy


def _load_on(devices: list[torch.device], config: TrainConfig, ranks: Ranks) -> Policy:
    assert config.policy.checkpoint is not None, "choose_devices refuses that"
    return load_data_parallel(
        config.policy.checkpoint,
        ["cpu"] if ranks.shard_base else devices,  # the whole base may not fit the device
        memory_budget=None if ranks.shard_base else config.policy.memory_budget,
        task_suite=config.task.task_suite,
        unnorm_key=config.policy.unnorm_key,
        dtype=choose_dtype(config.policy, devices[0]),
        load_in_4bit=config.policy.load_in_4bit or None,  # or as the adapter was trained, if it starts from one
        lora_rank=config.policy.lora_rank,
        lora_alpha=config.policy.lora_alpha,
        seed=config.run.seed,
        compile_network=False if ranks.shard_base else {"auto": None, "on": True, "off": False}[config.policy.compile],
    )


def fit_to_memory(config: TrainConfig, policy: Policy, ranks: Ranks = ALONE) -> TrainConfig:
    """Decide what is recomputed, and the micro-batch where it is "auto". Returns the configuration with its number."""
    wanted, micro_batch_size = config.policy.gradient_checkpointing, config.update.micro_batch_size
    blocks = policy.network.num_blocks if wanted == "on" else 0
    share = -(-config.update.batch_size // (ranks.size * len(policy.devices)))  # a device never has more at once
    if ranks.shard_base:  # the least memory: that is what a shared base is for
        blocks = 0 if wanted == "off" else policy.network.num_blocks
        micro_batch_size = 1 if micro_batch_size == "auto" else micro_batch_size
    elif policy.device.type == "cuda" and "auto" in (wanted, micro_batch_size):
        log.info("measuring what fits into memory; a large network is compiled first: a minute or two on a first start")
        needs = measure_needs(policy, synthetic_observations(policy, 1)[0])
        if wanted != "auto":
            needs = [need for need in needs if need.recomputed_blocks == blocks]
        free = free_for_activations(policy, others=config.task.num_envs * GPU_BYTES_PER_RENDERER)
        if micro_batch_size == "auto":
            plan = choose_plan(needs, free, share)
        else:
            plan = MemoryPlan(micro_batch_size, choose_plan(needs, free / micro_batch_size, 1).recomputed_blocks)
        micro_batch_size, blocks = plan.micro_batch_size, plan.recomputed_blocks
    policy.recompute(blocks)
    if micro_batch_size == "auto":
        micro_batch_size = share
    return replace(config, update=replace(config.update, micro_batch_size=micro_batch_size))


def env_spec(task: TaskConfig, num_images: int) -> EnvSpec:
    """The simulator's recipe: the configured tasks, with the cameras that the policy reads."""
    return EnvSpec(
        task_suite=task.task_suite,
        task_ids=task.task_ids,
        num_images=num_images,
        assets=task.assets,
        bddl_file=task.bddl_file,
        max_env_steps=task.max_env_steps,
    )


def weights_fingerprint(policy: Policy) -> str:
    """A hash of a policy's weights: samples of the frozen ones (`vla.weights.fingerprint`), all of the trained ones."""
    digest = hashlib.sha256(policy.base_fingerprint.encode())
    for name, parameter in policy.named_trainable_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
