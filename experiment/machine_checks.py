"""Check the machine of a run: packages, GPU, renderer, Ray, main memory and disk."""

import platform
import shutil
from importlib.metadata import version
from pathlib import Path

import torch

from configs.config import TrainConfig
from configs.sections import ModelConfig, SimulatorConfig
from contracts import GIB, BadInput, first_line, output_place
from envs.gl_backend import REPAIR, find_renderer, renders_in_software
from envs.libero_imports import check_versions, simulator_versions
from envs.worker import NoAnswer, ask
from experiment.checklist import Check, Checks
from experiment.checkpoints import latest_checkpoint
from experiment.file_lock import lock_file
from experiment.run_folder import LOCK_FILE
from experiment.simulators import SimulatorCount, ranks_here
from experiment.terminal import is_first_rank
from vla.adapter_folder import base_and_adapter
from vla.device import choose_device


def check_machine(checks: Checks, model: ModelConfig, simulator: SimulatorConfig) -> str:
    """Check the machine: packages, GPU, renderer and Ray. Returns the renderer's name. Raises BadInput."""
    checks.run("versions", check_installed)
    checks.run("device", check_device, model)
    renderer = find_renderer_apart()
    checks.run("rendering", check_renderer, renderer)
    if simulator.simulators == "ray":
        checks.run("ray", check_ray)
    return renderer


def check_installed() -> Check:
    """Show the versions of packages that affect results. Raises BadInput for simulator versions that change LIBERO."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        **simulator_versions(),
    }
    text = ", ".join(f"{package} {installed}" for package, installed in versions.items())
    caution = check_versions()
    return Check("warning", f"{text}: {caution}") if caution else Check("ok", text)


def check_device(model: ModelConfig) -> Check:
    """Show the device and its memory. Raises BadInput for a GPU that this torch cannot use."""
    device = choose_device(model.device, base_and_adapter(str(model.checkpoint))[0])
    if device.type != "cuda":
        return Check("ok", f"CPU, {torch.get_num_threads()} thread(s)")
    name = torch.cuda.get_device_name(device)
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError as error:
        repair = "see nvidia-smi; if this torch does not support it, run: pip install --upgrade torch torchvision timm"
        raise BadInput(f"{name} does not compute ({first_line(error)}): {repair}") from None
    return Check("ok", f"{name}, {torch.cuda.get_device_properties(device).total_memory / GIB:.0f} GiB")


def find_renderer_apart() -> str:
    """The name of the renderer, found by drawing a frame in another process. Raises BadInput if none can be drawn."""
    try:
        return ask(find_renderer)
    except NoAnswer as reason:
        raise BadInput(f"no frame can be rendered ({reason}); {REPAIR}") from None


def check_renderer(renderer: str) -> Check:
    """Warn of slow rendering in software on a machine with a GPU."""
    if renders_in_software(renderer) and torch.cuda.is_available():
        slow = "renders on the CPU, slowly, although there is a GPU: run `unset MUJOCO_GL PYOPENGL_PLATFORM`"
        return Check("warning", f"{renderer} {slow}; {REPAIR}")
    return Check("ok", renderer)


def check_ray() -> Check:
    """Join the Ray cluster and show what it has. Raises BadInput if there is none."""
    from envs.ray_workers import connect  # it imports ray, which is optional

    return Check("ok", connect())


def check_main_memory(simulators: SimulatorCount) -> Check:
    """Show how much main memory is free; warn if the simulators of all ranks on this machine will need more."""
    needed_gib = simulators.needed_gib * ranks_here()
    owner = f" of {ranks_here()} ranks" if ranks_here() > 1 else ""
    text = f"{simulators.free_gib:.1f} GiB are free, simulators{owner} need about {needed_gib:.1f} GiB"
    if simulators.free_gib < needed_gib:
        return Check("warning", f"{text}: lower --num-envs or --kept-tasks")
    return Check("ok", text)


def check_output(config: TrainConfig, resume: str | None) -> None:
    """Check that the run folder can be written, before the work begins. Raises BadInput.

    A resumed run also needs room for one more checkpoint.
    """
    if resume is None:
        with output_place(Path(config.run.output), "--output"):
            return
    with output_place(Path(resume), "--resume"):
        if is_first_rank():  # now, before this program takes memory that the one which trains needs
            lock_file(Path(resume) / LOCK_FILE, f"--resume {resume}: the run").release()
        files = latest_checkpoint(Path(resume)).rglob("*")
        needed = sum(file.stat().st_size for file in files) / 2**20
        free = shutil.disk_usage(resume).free / 2**20
    if free < needed:  # a checkpoint is written before an old one is deleted
        raise BadInput(
            f"--resume {resume}: {free:.0f} MiB are free, and a checkpoint has {needed:.0f}: free disk space"
        )
