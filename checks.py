"""The single checks of preflight.py. Each returns its finding in one sentence or raises an error with the repair."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from configs.config import RunConfig, TaskConfig
from envs.assets import describe_assets, is_lowpoly
from envs.egl import GPU_BYTES_PER_RENDERER
from envs.egl import REPAIR as RENDERING_REPAIR
from envs.setup import check_versions, simulator_versions
from envs.simulator_probes import NoAnswer, Renderer, ask, bowl_beside_ramekin_m, find_renderer
from envs.tasks import TaskInfo
from errors import BadInput
from findings import Caution
from rl.contracts import Observation, Pool
from rl.selfcheck import SelfCheckError
from rl.wandb_log import has_login, resolve_mode
from vla.checkpoint import CheckpointInfo
from vla.policy import Policy
from vla.resampling import CROP_AREA
from vla.statistics import normalisation_of, select_key, suites_named
from workshop.sft import SFT_RUN_FILE

GIB = 2**30
MIN_CONTRAST = 5.0  # standard deviation of a frame's pixel values, 0..255; an empty frame has none
BOWL_IN_RAMEKIN_M = 0.025  # seen: 0.0145 with mujoco 3.3.0 and 3.3.7, 0.0372 with 3.4.0 and 3.8.1
SIMULATOR_GIB = 0.8  # of a worker process (docs/RESULTS.md, soak)
COPIES_IN_CHECKPOINT = 3  # of every trained number, float32: itself and AdamW's two moments
RESERVE_GIB = 0.5  # of the disk, for videos, records and the report


def check_installed() -> str:
    """The versions that decide what is computed. Raises BadInput for those of the simulator that change LIBERO."""
    simulator = simulator_versions()
    caution = check_versions()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    finding = ", ".join(f"{name} {number}" for name, number in (versions | simulator).items())
    return Caution(f"{finding}: {caution}") if caution else finding


def describe_device(device: torch.device) -> str:
    """Name and memory of the device. Raises BadInput when it computes nothing, as when torch has no code for it."""
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} thread(s)"
    name = torch.cuda.get_device_name(device)
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if "no kernel image" not in reason:
            raise BadInput(
                f"{name} does not compute ({reason}): nvidia-smi shows its driver and who else uses it; "
                "CUDA_VISIBLE_DEVICES=N chooses another GPU"
            ) from None
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise BadInput(
            f"torch {torch.__version__} has no code for {name} (compute capability {capability}; it was built for "
            f"{', '.join(torch.cuda.get_arch_list())}); run: pip install --upgrade torch torchvision timm"
        ) from None
    memory = torch.cuda.get_device_properties(device).total_memory / GIB
    return f"{name}, {memory:.0f} GiB"


def check_rendering(has_gpu: bool) -> str:
    """One frame outside of LIBERO, and what drew it; software beside a GPU is a caution."""
    try:
        renderer = ask(find_renderer)
    except NoAnswer as reason:
        raise BadInput(f"no frame can be rendered ({reason}); {RENDERING_REPAIR}") from None
    where = "OSMesa" if renderer.device is None else f"EGL device {renderer.device}"
    finding = f"{where}: {renderer.name} ({renderer.vendor})"
    if renderer.in_software and has_gpu:
        return Caution(f"{finding} renders on the CPU, slowly, although there is a GPU; {_repair_software(renderer)}")
    return finding


def _repair_software(renderer: Renderer) -> str:
    if renderer.backend == "osmesa":
        return "run: unset MUJOCO_GL PYOPENGL_PLATFORM"
    return (
        "start the container with NVIDIA_DRIVER_CAPABILITIES=all, or install the driver's EGL part (Debian: "
        "libegl-nvidia0, Ubuntu: libnvidia-gl-VERSION) until `ls /usr/share/glvnd/egl_vendor.d` shows 10_nvidia.json"
    )


def check_physics() -> str:
    """A bowl settles into its ramekin in libero_spatial task 5, as in the demonstrations. Raises BadInput."""
    try:
        distance = ask(bowl_beside_ramekin_m)
    except NoAnswer as reason:
        raise BadInput(
            f"libero_spatial task 5 cannot be reset ({reason}); run: pip install mujoco==3.3.0 && "
            "pip install --no-deps -r requirements-simulator.txt"
        ) from None
    if distance > BOWL_IN_RAMEKIN_M:
        raise BadInput(
            f"the bowl of libero_spatial task 5 slid off its ramekin ({1000 * distance:.0f} mm beside it): this MuJoCo "
            "has other contacts than LIBERO's demonstrations; run: pip install mujoco==3.3.0"
        )
    return f"the bowl of libero_spatial task 5 settles in its ramekin ({1000 * distance:.0f} mm off its centre)"


def check_host_memory(num_envs: int) -> str:
    """The simulators fit into what memory is free."""
    needed, free = num_envs * SIMULATOR_GIB, available_memory()
    if free is None:
        return "unknown: there is no /proc/meminfo"
    finding = f"{free / GIB:.1f} GiB are free, {num_envs} simulator(s) will take about {needed:.1f}"
    return Caution(f"{finding}: lower --num-envs") if free < needed * GIB else finding


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that new processes can have without swapping; None where the system does not say."""
    try:
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def check_disk(run: RunConfig, policy: Policy | None) -> str:
    """The run's checkpoints fit onto the disk. Raises BadInput; a policy that is not known takes none."""
    output = Path(run.output).absolute()
    free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.is_dir())).free
    if policy is None:
        return f"{free / GIB:.1f} GiB are free in {output}"
    trained = sum(parameter.numel() for _, parameter in policy.named_trainable_parameters())
    kept = run.keep_checkpoints + 2  # and `best`, and one that is being written
    needed = 4 * trained * COPIES_IN_CHECKPOINT * kept + RESERVE_GIB * GIB
    finding = f"{free / GIB:.1f} GiB are free in {output}, {kept} checkpoints and records take {needed / GIB:.1f}"
    if free < needed:
        raise BadInput(f"{finding}: name a folder on another disk with --output, or lower --keep-checkpoints")
    return finding


def check_wandb(mode: str) -> str:
    """Where records go beside metrics.jsonl."""
    resolved = resolve_mode(mode)
    if resolved == "disabled":
        return "disabled: records go to metrics.jsonl alone"
    if resolved not in ("online", "offline", "dryrun", "run", "shared"):
        return Caution(f"WANDB_MODE={resolved} is no mode of wandb: use --wandb-mode online, offline or disabled")
    if find_spec("wandb") is None:
        return Caution("wandb is not installed: records go to metrics.jsonl alone; run: pip install wandb")
    if resolved == "online" and not has_login():
        return Caution("online, but there is no login on this machine: run: wandb login, or use --wandb-mode offline")
    return resolved if mode != "auto" or resolved == "online" else "offline: there is no login (wandb login)"


def describe_checkpoint(info: CheckpointInfo) -> str:
    """What kind of policy a folder holds, and what it reads."""
    reads = "1 image" if info.num_images == 1 else f"{info.num_images} images"
    return (
        f"{info.kind}; reads {reads}, the middle {100 * CROP_AREA:.0f} % of each,"
        f"{' proprio' if info.uses_proprio else ' no proprio'}; {info.folder}"
    )


def check_statistics(info: CheckpointInfo, task_suite: str, unnorm_key: str | None) -> str:
    """The ranges of actions in force. Raises BadInput when there are none for the suite, unless some are asked for."""
    key = select_key(info.statistics, task_suite, unnorm_key)
    action = info.statistics[key].action
    low, high = action.bounds(normalisation_of(action.dim))
    finding = f"{key}: actions from [{_numbers(low)}] to [{_numbers(high)}]"
    suites = suites_named(key)
    if (suites and task_suite not in suites) or "libero" not in key:
        return Caution(f"{finding} are not those of {task_suite}: leave out --unnorm-key, or use a checkpoint of it")
    return finding


def check_suite(name: str, task_suite: str) -> str:
    """Whether the checkpoint's name speaks of the suite that it is to act in."""
    suites = suites_named(name)
    if suites and task_suite not in suites:
        return Caution(
            f"{name} names {', '.join(sorted(suites))}, and the tasks are of {task_suite}: a policy of another suite "
            f"has no success as a rule; use --task-suite {min(suites)}, or another --checkpoint"
        )
    return f"{name} names {task_suite}" if suites else f"{name} names no suite"


def check_looks(info: CheckpointInfo, assets: str) -> str:
    """Whether the policy will see what it was trained on, as far as its folder tells."""
    looks = describe_assets(assets)
    if is_lowpoly(assets) and not (info.folder / SFT_RUN_FILE).is_file():  # workshop.sft learns from our pictures
        return Caution(
            f"{looks}, and nothing in the checkpoint's folder says that it was trained on them: one that was trained "
            "on LIBERO's own pictures needs --assets official"
        )
    return looks


def check_init_states(task: TaskConfig, tasks: Sequence[TaskInfo]) -> str:
    """Raise BadInput when a task has fewer initial states than the configuration uses."""
    needed = max(task.train_init_states[1], task.eval_init_states[1])
    for info in tasks:
        if info.num_init_states < needed:
            raise BadInput(
                f"task {info.task_id} ({info.name}) has {info.num_init_states} initial states, but {needed} are needed "
                f"for --train-init-states {task.train_init_states} and --eval-init-states {task.eval_init_states}: "
                f"lower them to {info.num_init_states}"
            )
    (first, end), (eval_first, eval_end) = task.train_init_states, task.eval_init_states
    return f"training uses {first} to {end - 1}, evaluation {eval_first} to {eval_end - 1}, of {len(tasks)} task(s)"


def first_observation(pool: Pool, task_id: int, init_state_id: int) -> Observation:
    """The first observation of an episode. Raises BadInput when the simulator cannot give one."""
    pool.reset(0, task_id, init_state_id)
    ((_, result),) = pool.ready()
    if result.error is not None:
        raise BadInput(
            f"the simulator failed at its first reset (task {task_id}): {result.error}; look at the messages above, or "
            "install it anew: pip install --no-deps -r requirements-simulator.txt"
        )
    assert result.observation is not None, "a reset without an error brings an observation"
    return result.observation


def check_frame(observation: Observation) -> str:
    """The rendered frames show something."""
    contrast = [float(image.std()) for image in observation.images]
    if min(contrast) < MIN_CONTRAST:
        raise BadInput(
            f"a rendered frame is empty (standard deviation of its pixels: {min(contrast):.1f}): check the GL driver "
            "(try MUJOCO_GL=osmesa), or --assets"
        )
    size = " x ".join(str(n) for n in observation.images.shape[1:3])
    cameras = f"{len(observation.images)} camera" + "s" * (len(observation.images) > 1)
    return f"{cameras}, {size} pixels, contrast {np.mean(contrast):.0f}"


def check_replicas(policy: Policy) -> str:
    """What one device writes into another's memory arrives: some mainboards garble copies between GPUs."""
    if policy.replicas is not None and not policy.replicas.are_equal():
        raise BadInput(
            "copies between the GPUs of this machine do not arrive: switch off its IOMMU (or ACS) in the BIOS, or "
            "leave out --data-parallel"
        )
    return f"{len(policy.devices)} devices have the same trainable parameters"


def check_memory(policy: Policy, observation: Observation, micro_batch_size: int, num_envs: int) -> str:
    """One forward and backward pass of a micro-batch per device, the largest thing that happens. Raises BadInput.

    Beside it the GPU has to hold all simulators but the one that has drawn the first frame: less room is a caution.
    """
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
        raise SelfCheckError(
            "no gradient reaches the adapters: the policy cannot learn; run: pip install -r requirements.txt"
        )
    finding = f"a backward pass of {micro_batch_size} decisions reaches {reached} of {len(trained)} trainable tensors"
    if not on_gpu:
        return finding
    peak = torch.cuda.max_memory_allocated(policy.device) / GIB
    unused, total = (size / GIB for size in torch.cuda.mem_get_info(policy.device))
    finding += f"; it peaks at {peak:.1f} GiB, {unused:.1f} of {total:.1f} GiB are unused"
    others = (num_envs - 1) * GPU_BYTES_PER_RENDERER / GIB
    if unused < others:
        return Caution(
            f"{finding}, and the other simulators will take {others:.1f}: lower --num-envs, or set "
            "--memory-budget to leave them room"
        )
    return finding


def _numbers(values: np.ndarray) -> str:
    return " ".join(f"{value:.2f}" for value in values)
