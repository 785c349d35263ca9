"""Check a run before its first episode: what the machine lacks, and faults of the policy that raise no error.

A check logs a row of what it found, or raises BadInput, which says how to repair it. `--check-only` stops afterwards.
"""

import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import probes
from configs.config import TrainConfig
from configs.sections import ModelConfig
from contracts import GIB, BadInput, first_line, lock_file, output_place
from envs.assets import Pack, find_pack
from envs.libero_imports import check_versions, simulator_versions
from experiment.checkpoints import latest_checkpoint
from experiment.setup import Setup
from experiment.stored_run import LOCK_FILE
from experiment.terminal import is_first_rank, log_row
from vla.adapter_folder import base_and_adapter
from vla.checkpoint import CheckpointInfo
from vla.device import choose_device

MIN_CONTRAST = 5.0  # least standard deviation of a frame's pixel values (0 to 255); in an empty frame it is 0


def check_machine(config: TrainConfig, resume: str | None = None) -> None:
    """Check what needs no policy: a place to write, packages and GPU. Raises BadInput."""
    if resume is None:
        with output_place(Path(config.run.output), "--output"):
            pass
    else:
        check_resumed_folder(Path(resume))
    check_packages()
    check_device(config.model)


def check_resumed_folder(run_folder: Path) -> None:
    """Check that a run can be continued, before the program takes memory that one which trains needs."""
    with output_place(run_folder, "--resume"):
        if is_first_rank():
            lock_file(run_folder / LOCK_FILE, f"--resume {run_folder}: the run").release()
        latest_checkpoint(run_folder)


def check_packages() -> None:
    """Log the versions of packages that affect results. Raises BadInput for simulator versions that change LIBERO."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        **simulator_versions(),
    }
    log_row("versions", ", ".join(f"{package} {installed}" for package, installed in versions.items()))
    check_versions()


def check_device(model: ModelConfig) -> None:
    """Log the device and its memory. Raises BadInput for a GPU that this torch cannot use."""
    device = choose_device(model.device, base_and_adapter(str(model.checkpoint))[0])
    if device.type != "cuda":
        log_row("device", f"CPU, {torch.get_num_threads()} thread(s)")
        return
    name = str(device)
    try:
        name = torch.cuda.get_device_name(device)
        torch.ones(2, device=device).sum().item()
    except RuntimeError as error:
        repair = "see nvidia-smi; if this torch does not support it, run: pip install --upgrade torch torchvision timm"
        raise BadInput(f"{name} does not compute ({first_line(error)}): {repair}") from None
    log_row("device", f"{name}, {torch.cuda.get_device_properties(device).total_memory / GIB:.0f} GiB")


def probe(setup: Setup) -> None:
    """Check what the policy sees and what it makes of it. Raises BadInput, or SelfCheckError for a fault of ours."""
    config = setup.config
    policy = setup.learner.policy
    observation = setup.observation
    warning = looks_warning(policy.info, find_pack(config.simulator.assets))
    if warning is not None:
        log_row("warning", warning)
    check_first_frame(observation.images)
    if config.loss.advantage == "gae" and observation.state is None:
        raise BadInput(
            "--advantage gae needs Observation.state, which this simulator does not give: use batch"
        )
    log_row("attention", probes.attention_probe(policy, observation))
    log_row("images", probes.image_probe(policy, observation))
    log_row("log-probs", probes.check_logits_path(policy, observation, config.rollout.temperature))
    micro_batch_size = int(config.update.micro_batch_size)
    log_row("learning", probes.check_learning(policy, observation, micro_batch_size))


def looks_warning(info: CheckpointInfo, pack: Pack) -> str | None:
    """A warning if the policy will see other looks than in its training, else None.

    A checkpoint that names no looks is assumed to have been trained on LIBERO's own.
    """
    trained_on = info.looks or ("official",)
    if pack.looks in trained_on:
        return None
    names = [
        looks if looks in ("official", "lowpoly") else f"the folder of pack {looks}" for looks in trained_on
    ]
    assumed = "" if info.looks else " (assumed, because its folder does not say)"
    return (
        f"assets {pack}, but the policy was trained on {' and '.join(trained_on)}{assumed}; "
        f"use --assets {' or '.join(names)}"
    )


def check_first_frame(images: np.ndarray) -> None:
    """Check that no camera's image is empty; images: (num_images, H, W, 3). Raises BadInput."""
    contrast = min(float(image.std()) for image in images)
    text = f"{len(images)} camera(s), {images.shape[2]} x {images.shape[1]} pixels, contrast {contrast:.1f}"
    if contrast < MIN_CONTRAST:
        raise BadInput(f"{text}: a rendered frame is empty; check the GL driver, or --assets")
    log_row("first frame", text)
