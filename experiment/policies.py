"""Find and load the policy of a run or an evaluation, and its teacher, and choose the looks that it sees."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Literal

from configs.config import TrainConfig
from configs.sections import ModelConfig, UpdateConfig
from envs.assets import find_pack, installed_official
from envs.tasks import split_suite
from rl.teacher_choice import TeacherChoice, choose_teacher
from vla.adapter_folder import base_and_adapter, read_metadata
from vla.checkpoint import CheckpointInfo, inspect_checkpoint
from vla.dataset_statistics import scale_digest
from vla.device import choose_device, is_large
from vla.hub import resolve_checkpoint
from vla.load_options import LoadOptions
from vla.network_config import read_network_config
from vla.policy import Policy


def find_checkpoint(model: ModelConfig) -> CheckpointInfo:
    """Find the folder or hub id of --checkpoint and describe what it holds. Raises BadInput if it is not usable."""
    base, adapter = base_and_adapter(str(model.checkpoint))
    return inspect_checkpoint(resolve_checkpoint(base), adapter_folder=adapter)


def choose_looks(assets: str, model: ModelConfig) -> str:
    """The name of the assets, or the absolute path of their folder.

    Raises BadInput if the assets are not installed.
    """
    if assets == "auto":
        assets = "official" if prefers_official_looks(model) else "lowpoly"
    pack = find_pack(assets)
    return str(pack.folder) if pack.name == "own" else assets


def prefers_official_looks(model: ModelConfig) -> bool:
    """Whether a policy sees LIBERO's own looks by default.

    It does if it was trained on them; for an adapter the training that wrote it counts. A small policy sees them only
    on a GPU, and where they are installed: on a CPU they cost it two thirds of its speed. Raises BadInput for a
    checkpoint that needs a GPU where there is none.
    """
    base, adapter = base_and_adapter(str(model.checkpoint))
    has_gpu = choose_device(model.device, base).type == "cuda"
    if not is_large(base) and (not has_gpu or installed_official() is None):
        return False
    trained_on = set() if adapter is None else set(read_metadata(Path(adapter)).get("looks", "").split())
    if not trained_on and Path(base).is_dir():
        trained_on = set(read_network_config(Path(base)).looks)
    # Most checkpoints name no looks, and were trained on the official ones.
    return not trained_on or "official" in trained_on


def model_before(model: ModelConfig, checkpoint: str) -> ModelConfig:
    """The model of an evaluation that is compared with that of `model`, whose flags it shares.

    If `model` is an adapter that was trained on this checkpoint, it is played as in that training, with the images and
    the statistics that the adapter remembers. Raises BadInput if one of the two is not usable.
    """
    before = replace(model, checkpoint=checkpoint)
    base, adapter = base_and_adapter(str(model.checkpoint))
    if adapter is None or base_and_adapter(checkpoint)[1] is not None:
        return before
    if resolve_checkpoint(base).resolve() != resolve_checkpoint(checkpoint).resolve():
        return before
    metadata = read_metadata(Path(adapter))
    num_images = int(metadata.get("num_images", 0)) or None
    return replace(
        before,
        num_images=model.num_images or num_images,
        unnorm_key=model.unnorm_key or metadata.get("unnorm_key") or None,
    )


def load_policy(
    model: ModelConfig,
    task_suite: str,
    lora_rank: int = UpdateConfig.lora_rank,
    seed: int = 0,
    trained_blocks: int | Literal["all"] = "all",
) -> Policy:
    """Load --checkpoint: a pretrained policy with new adapters, or a trained one. Raises BadInput."""
    # LIBERO-PRO's and LIBERO-Plus's suites have the data of the suite that they change.
    base_suite, _ = split_suite(task_suite)
    options = LoadOptions(
        task_suite=base_suite,
        unnorm_key=model.unnorm_key,
        num_images=model.num_images,
        lora_rank=lora_rank,
        trained_blocks=None if trained_blocks == "all" else trained_blocks,
        l1_student=model.l1_student,
        seed=seed,
        device=model.device,
        memory_budget=model.memory_budget,
        frozen_weights=model.frozen_weights,
        compile=model.compile,
    )
    return Policy.load(str(model.checkpoint), options)


def describe_policy(policy: Policy) -> list[tuple[str, str]]:
    """(Name, value) rows of the table that is shown at the start of a run."""
    parameters = policy.named_trainable_parameters()
    num_trainable = sum(parameter.numel() for _, parameter in parameters)
    network = policy.network
    has_head = "without" if policy.l1_head is None else "with"
    rows = [
        ("checkpoint", policy.base_model),
        ("kind", f"{policy.info.kind}, {has_head} an L1 head"),
        ("tokens", "drawn around the L1 head's actions" if policy.is_laplace else "of the token head"),
        ("reads", policy.info.reads),
        ("statistics key", policy.unnorm_key),
        ("chunk", f"{policy.chunk_length} x {policy.action_dim}"),
        ("parameters", f"{policy.num_frozen:,} frozen, {policy.frozen_weights}"),
        ("trainable", f"{num_trainable:,} in {len(parameters)} tensors, torch.float32"),
        ("recomputed", f"{network.recomputed_blocks} of {network.num_blocks} blocks in backward passes"),
        ("device", str(policy.device)),
    ]
    if network.trained_blocks is not None:
        place = "nowhere" if policy.kept_on is None else f"on {policy.kept_on}"
        text = f"frozen below the last {network.trained_blocks} blocks, its states are kept {place}"
        rows.append(("trunk", text))
    return rows


def choose_and_keep_teacher(policy: Policy, config: TrainConfig) -> TeacherChoice:
    """Keep the policy as it is as the teacher, and return how it decides, and why. Raises BadInput.

    Before training, a policy without a trained adapter is its own teacher as soon as its adapters are left out.
    """
    checkpoint = str(config.model.checkpoint)
    _, adapter = base_and_adapter(checkpoint)
    if adapter is not None:
        policy.freeze_as_teacher()
    kl_coef = config.loss.kl_coef
    return choose_teacher(config.phases, checkpoint, kl_coef, policy.can_act_by_l1, policy.is_laplace)


def weights_fingerprint(policy: Policy) -> str:
    """Hash what decides: samples of the frozen weights (`vla.weights.fingerprint`), all trained ones, head, scales."""
    digest = hashlib.sha256(policy.base_fingerprint.encode())
    if policy.is_laplace:
        digest.update(b"laplace")
    for key, statistics in sorted(policy.info.statistics.items()):
        digest.update(f"{key} {scale_digest(statistics)}".encode())
    head = () if policy.l1_head is None else policy.l1_head.named_parameters()
    for name, parameter in (*policy.named_trainable_parameters(), *head):
        digest.update(name.encode())
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
