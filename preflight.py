"""The checks before the first episode: each finding is one line, with the command that repairs it where one is needed.

A training run makes them and stops at the first failure. `--check-only` makes them and some slower ones, also those
that a failure before them leaves possible, and shows all findings.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import imageio.v2 as imageio
import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from configs.config import ModelConfig, RunConfig, SimulatorConfig, TaskConfig, TrainConfig, require
from contracts import BadInput, Observation, SelfCheckError, first_line
from envs.assets import describe_assets
from envs.libero import EnvSpec, bowl_beside_ramekin_m, task_info
from envs.pool import Pool, WorkerPool
from envs.rendering import GPU_BYTES_PER_RENDERER, REPAIR, check_versions, find_renderer, simulator_versions
from envs.tasks import TaskInfo
from envs.worker import NoAnswer, ask
from rl.phases import choose_teacher
from rl.selfcheck import (
    Caution,
    attention_probe,
    check_learning,
    check_logits_path,
    check_memory,
    image_probe,
    made_up_observation,
    token_probe,
)
from vla.checkpoint import CheckpointInfo, base_and_adapter, inspect_checkpoint, resolve_checkpoint
from vla.memory import fit_to_memory
from vla.policy import Policy, choose_device
from vla.tokens import normalisation_of, select_key, suites_named

log = logging.getLogger("train")
GIB = 2**30
FIRST_FRAME_S = 120.0  # until --check-only gives the simulator up
MIN_CONTRAST = 5.0  # standard deviation of a frame's pixel values, 0..255; an empty frame has none
BOWL_IN_RAMEKIN_M = 0.025  # seen: 0.0145 with mujoco 3.3.0 and 3.3.7, 0.0372 with 3.4.0 and 3.8.1
SIMULATOR_GIB = 0.8  # of a worker process (docs/RESULTS.md, soak)
COPIES_IN_CHECKPOINT = 3  # of every trained number, float32: itself and AdamW's two moments
RESERVE_GIB = 0.5  # of the disk, for videos, records and the report
OUR_PICTURES = "sft_run.json"  # the file of a checkpoint that `workshop.sft` has trained on pictures that we drew
STYLES = {"ok": "green", "warning": "yellow", "FAILED": "bold red", "skipped": "dim"}
REINSTALL = "run: pip install mujoco==3.3.0 && pip install --no-deps -r requirements-simulator.txt"


class Finding(NamedTuple):
    check: str
    status: str  # a key of STYLES
    text: str
    seconds: float


class Checks:
    """Makes checks one after the other and remembers their findings.

    The first failure is raised. With `show_all` it is a finding like others, and all are printed as they are made: a
    crash that takes the program along leaves those before it on the screen.
    """

    def __init__(self, show_all: bool = False, silent: bool = False) -> None:
        self.findings: list[Finding] = []
        self._show_all = show_all
        # Long lines are the terminal's to wrap: a command in them can be copied.
        self._console = Console(quiet=silent or not show_all, soft_wrap=True, highlight=False)

    def make(self, name: str, check: Callable[[], Any], *needs: Any) -> Any:
        """Make a check, which returns its finding or a pair of a value and its finding; returns that finding or value.

        None when it fails, or is skipped because one of `needs` is None: what should have given that has failed.
        """
        started, value, status, text = time.perf_counter(), None, "skipped", "what it needs has failed"
        if all(need is not None for need in needs):
            try:
                found = check()
                value, text = found if isinstance(found, tuple) else (found, found)
                status = "warning" if isinstance(text, Caution) else "ok"
            except Exception as failure:
                if not self._show_all:
                    raise
                status, text = "FAILED", str(failure)
                if not isinstance(failure, BadInput | SelfCheckError):
                    log.error("a check ended in a fault", exc_info=failure)
                    text = f"{type(failure).__name__}: {first_line(failure)} (a fault: its traceback is above)"
        finding = Finding(name, status, text, time.perf_counter() - started)
        self.findings.append(finding)
        self._console.print(Text(f"{status:8} {name:14} {finding.seconds:5.1f} s  {text}", style=STYLES[status]))
        return value

    def passed(self, *names: str) -> bool | None:
        """True, or None when one of these checks did not pass: for those that need it."""
        return None if any(f.check in names and f.status in ("FAILED", "skipped") for f in self.findings) else True

    def summary(self) -> str:
        counts = Counter(finding.status for finding in self.findings)
        counted = ", ".join(f"{counts[status]} {status}" for status in STYLES if counts[status])
        return f"{len(self.findings)} checks in {sum(finding.seconds for finding in self.findings):.1f} s: {counted}"

    def conclude(self) -> None:
        """Print the summary. Raises BadInput when a check has failed."""
        self._console.print(self.summary())
        failed = [f"{finding.check}: {finding.text}" for finding in self.findings if finding.status == "FAILED"]
        if failed:
            raise BadInput(f"{len(failed)} of {len(self.findings)} checks FAILED; {failed[0]}")


def check_machine(checks: Checks, config: TrainConfig) -> torch.device | None:
    """What can be checked before the policy is loaded; returns the device that it will run on."""
    checks.make("versions", check_installed)
    device = checks.make("device", lambda: check_device(config.model))
    checks.make("rendering", lambda: check_rendering(torch.cuda.is_available()))
    checks.make("host memory", lambda: check_host_memory(config.simulator.num_envs))
    return device


def check_setup(
    checks: Checks, config: TrainConfig, policy: Policy, pool: Pool, tasks: Sequence[TaskInfo]
) -> Observation:
    """Check policy and simulator; returns the first observation of the first task. Raises the first failure."""
    checks.make("checkpoint", lambda: describe_checkpoint(policy.info))
    check_belonging(checks, config, policy.info)
    checks.make("disk", lambda: check_disk(config.run, policy))
    checks.make("initial states", lambda: check_init_states(config.task, tasks))
    observation = checks.make("first frame", lambda: check_first_frame(pool, config.task, tasks))
    check_policy(checks, config, policy, observation, config.update.micro_batch_size)
    return observation


def check_only(config: TrainConfig) -> None:
    """Make all checks and print a line for each; of several ranks the first prints. Raises BadInput if one failed."""
    checks = Checks(show_all=True, silent=os.environ.get("RANK", "0") != "0")
    check_machine(checks, config)
    can_simulate = checks.passed("versions", "rendering")
    info = checks.make("checkpoint", lambda: find_checkpoint(config.model), checks.passed("device"))
    check_belonging(checks, config, info)
    checks.make("teacher", lambda: ": ".join(choose_teacher(config, info.has_l1_head)), info)
    policy = checks.make("weights", lambda: load_weights(config), checks.passed("device", "suite"))
    micro_batch_size = checks.make("micro-batch", lambda: fit_micro_batch(config, policy), policy)
    checks.make("disk", lambda: check_disk(config.run, policy))
    checks.make("physics", check_physics, can_simulate)
    spec = checks.make("tasks", lambda: find_tasks(config, info.num_images if info else 1))
    tasks: Any = None if spec is None else task_info(spec)
    checks.make("initial states", lambda: check_init_states(config.task, tasks), tasks)
    observation = checks.make("first frame", lambda: first_frame_apart(config, spec, tasks), spec, can_simulate)
    check_policy(checks, config, policy, observation, micro_batch_size)
    checks.conclude()


# What is Any below is None where the check that should have given it has failed.


def check_belonging(checks: Checks, config: TrainConfig, info: Any) -> None:
    """Whether the checkpoint is one of the suite, by its statistics and its name, and of what will be seen."""
    suite, model = config.task.task_suite, config.model
    checks.make("suite", lambda: check_suite(info, base_of(model), suite, model.unnorm_key), info)
    checks.make("looks", lambda: check_looks(info, config.simulator.assets), info)


def check_policy(checks: Checks, config: TrainConfig, policy: Any, observation: Any, micro_batch_size: Any) -> None:
    """Ask the policy what no error message would ever tell, and learn something that is undone (`rl.selfcheck`)."""
    seen = made_up_observation(policy) if policy is not None and observation is None else observation
    temperature, others = config.rollout.temperature, (config.simulator.num_envs - 1) * GPU_BYTES_PER_RENDERER
    # After an L1 teacher's warmup nothing is left of the checkpoint's token logits.
    has_l1_teacher = policy is not None and policy.action_head is not None and config.phases.teacher != "greedy"
    needs_tokens = not (config.evaluation.allow_zero_baseline or (has_l1_teacher and config.phases.warmup))
    checks.make("attention", lambda: attention_probe(policy), policy)
    checks.make("images", lambda: image_probe(policy), policy)
    checks.make("token head", lambda: token_probe(policy, seen, needs_tokens), policy, observation)
    checks.make("log-probs", lambda: check_logits_path(policy, seen, temperature), policy)
    fits = checks.make("memory", lambda: check_memory(policy, [seen] * micro_batch_size, others), micro_batch_size)
    checks.make("learning", lambda: check_learning(policy, seen), fits)


def check_installed() -> str:
    """The versions that decide what is computed. Raises BadInput for those of the simulator that change LIBERO."""
    ours = {"python": platform.python_version(), "torch": torch.__version__, "transformers": version("transformers")}
    finding = ", ".join(f"{name} {number}" for name, number in (ours | simulator_versions()).items())
    caution = check_versions()
    return Caution(f"{finding}: {caution}") if caution else finding


def check_device(model: ModelConfig) -> tuple[torch.device, str]:
    """The device, its name and memory. Raises BadInput when it computes nothing, as when torch has no code for it."""
    device = choose_device(model.device, base_of(model))
    if device.type != "cuda":
        return device, f"CPU, {torch.get_num_threads()} thread(s)"
    name = torch.cuda.get_device_name(device)
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError as error:
        raise BadInput(
            f"{name} does not compute ({first_line(error)}): nvidia-smi shows its driver and who else uses it, "
            "CUDA_VISIBLE_DEVICES=N chooses another GPU; where torch has no code for it (no kernel image), run: "
            "pip install --upgrade torch torchvision timm"
        ) from None
    return device, f"{name}, {torch.cuda.get_device_properties(device).total_memory / GIB:.0f} GiB"


def check_rendering(has_gpu: bool) -> str:
    """One frame outside of LIBERO, and what drew it; software beside a GPU is a caution."""
    try:
        renderer = ask(find_renderer)
    except NoAnswer as reason:
        raise BadInput(f"no frame can be rendered ({reason}); {REPAIR}") from None
    where = "OSMesa" if renderer.device is None else f"EGL device {renderer.device}"
    finding = f"{where}: {renderer.name} ({renderer.vendor})"
    if renderer.in_software and has_gpu:
        return Caution(
            f"{finding} renders on the CPU, slowly, although there is a GPU; run: unset MUJOCO_GL PYOPENGL_PLATFORM; "
            "start the container with NVIDIA_DRIVER_CAPABILITIES=all, or install the driver's EGL part (Debian: "
            "libegl-nvidia0, Ubuntu: libnvidia-gl-VERSION)"
        )
    return finding


def check_physics() -> str:
    """A bowl settles into its ramekin in libero_spatial task 5, as in the demonstrations. Raises BadInput."""
    try:
        distance = ask(bowl_beside_ramekin_m)
    except NoAnswer as reason:
        raise BadInput(f"libero_spatial task 5 cannot be reset ({reason}); {REINSTALL}") from None
    finding = f"the bowl of libero_spatial task 5 settles {1000 * distance:.0f} mm off its ramekin's centre"
    wrong = "it slid off: this MuJoCo has other contacts than the demonstrations; run: pip install mujoco==3.3.0"
    require(distance <= BOWL_IN_RAMEKIN_M, f"{finding}: {wrong}")
    return finding


def check_host_memory(num_envs: int, meminfo: Path = Path("/proc/meminfo")) -> str:
    """The simulators fit into what memory is free."""
    if not meminfo.is_file():
        return "unknown: there is no /proc/meminfo"
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free, needed = int(lines["MemAvailable"].split()[0]) / 2**20, num_envs * SIMULATOR_GIB
    finding = f"{free:.1f} GiB are free, {num_envs} simulator(s) will take about {needed:.1f}"
    return Caution(f"{finding}: lower --num-envs") if free < needed else finding


def check_disk(run: RunConfig, policy: Policy | None) -> str:
    """The run's checkpoints fit onto the disk. Raises BadInput; a policy that is not known takes none."""
    output = Path(run.output).absolute()
    free = shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.is_dir())).free / GIB
    trained = 0 if policy is None else sum(parameter.numel() for _, parameter in policy.named_trainable_parameters())
    kept = run.keep_checkpoints + 2  # and `best`, and one that is being written
    needed = 4 * trained * COPIES_IN_CHECKPOINT * kept / GIB + RESERVE_GIB
    finding = f"{free:.1f} GiB are free in {output}, {kept} checkpoints and records take {needed:.1f}"
    require(free >= needed, f"{finding}: name a folder on another disk with --output, or lower --keep-checkpoints")
    return finding


def base_of(model: ModelConfig) -> str:
    """Folder or hub id of what is to run: a checkpoint, or the base of a trained adapter. Raises BadInput."""
    if model.checkpoint is None:
        raise BadInput("no public checkpoint is known for this suite: name a folder or a hub id with --checkpoint")
    return base_and_adapter(model.checkpoint, None)[0]


def find_checkpoint(model: ModelConfig) -> tuple[CheckpointInfo, str]:
    """What a checkpoint is, from its small files and headers. Raises BadInput."""
    info = inspect_checkpoint(resolve_checkpoint(base_of(model)))
    return info, describe_checkpoint(info)


def describe_checkpoint(info: CheckpointInfo) -> str:
    reads = f"{info.num_images} image(s) and {'' if info.uses_proprio else 'no '}proprio"
    return f"{info.kind}; reads {reads}; {info.folder}"


def check_suite(info: CheckpointInfo, base: str, task_suite: str, unnorm_key: str | None) -> str:
    """The ranges of actions in force, and whether they and the checkpoint's name are those of the suite.

    Raises BadInput when there are none for the suite, unless some are asked for.
    """
    key = select_key(info.statistics, task_suite, unnorm_key)
    action = info.statistics[key].action
    low, high = (" ".join(f"{v:.2f}" for v in bound) for bound in action.bounds(normalisation_of(action.dim)))
    finding = f"{key}: actions from [{low}] to [{high}]"
    for name, repair in ((key, "leave out --unnorm-key"), (Path(base).name, "use another --task-suite")):
        if suites_named(name) and task_suite not in suites_named(name):
            return Caution(
                f"{finding}; {name} is of another suite than the tasks ({task_suite}), and a policy of another suite "
                f"has no success as a rule: {repair}, or use another --checkpoint"
            )
    return finding


def check_looks(info: CheckpointInfo, assets: str) -> str:
    """Whether the policy will see what it was trained on, as far as its folder tells."""
    looks = describe_assets(assets)
    if assets == "lowpoly" and not (info.folder / OUR_PICTURES).is_file():
        return Caution(
            f"{looks}, and nothing in the checkpoint's folder says that it was trained on them: one that was trained "
            "on LIBERO's own pictures needs --assets official"
        )
    return looks


def find_tasks(config: TrainConfig, num_images: int) -> tuple[EnvSpec, str]:
    spec = env_spec(config.task, config.simulator, num_images)
    return spec, "; ".join(f"{info.task_id} {info.instruction}" for info in task_info(spec))


def check_init_states(task: TaskConfig, tasks: Sequence[TaskInfo]) -> str:
    """Raise BadInput when a task has fewer initial states than the configuration uses."""
    (first, end), (eval_first, eval_end) = task.train_init_states, task.eval_init_states
    for info in tasks:
        require(
            max(end, eval_end) <= info.num_init_states,
            f"task {info.task_id} ({info.name}) has {info.num_init_states} initial states: lower --train-init-states "
            f"{first} {end} and --eval-init-states {eval_first} {eval_end} to them",
        )
    return f"training uses {first} to {end - 1}, evaluation {eval_first} to {eval_end - 1}, of {len(tasks)} task(s)"


def check_first_frame(pool: Pool, task: TaskConfig, tasks: Sequence[TaskInfo]) -> tuple[Observation, str]:
    """The first observation of the first episode, and that it shows something. Raises BadInput."""
    pool.reset(0, tasks[0].task_id, task.train_init_states[0])
    ((_, result),) = pool.ready()
    if result.observation is None:
        reason = f"task {tasks[0].task_id}: {result.error}"
        raise BadInput(f"the simulator failed at its first reset ({reason}), look at the messages above; {REINSTALL}")
    images = result.observation.images
    contrast = [float(image.std()) for image in images]
    finding = f"{len(images)} camera(s), {images.shape[2]} x {images.shape[1]} pixels, contrast {min(contrast):.1f}"
    empty = "a rendered frame is empty: check the GL driver (try MUJOCO_GL=osmesa), or --assets"
    require(min(contrast) >= MIN_CONTRAST, f"{finding}: {empty}")
    return result.observation, finding


def first_frame_apart(config: TrainConfig, spec: EnvSpec, tasks: Sequence[TaskInfo]) -> tuple[Observation, str]:
    """The same in a process of its own: a simulator that hangs or crashes is a finding, too."""
    with WorkerPool(spec, 1, build_timeout_s=FIRST_FRAME_S) as pool:
        return check_first_frame(pool, config.task, tasks)


def load_weights(config: TrainConfig) -> tuple[Policy, str]:
    update = config.update
    policy = load_policy(config.model, config.task.task_suite, update.lora_rank, update.lora_alpha, config.run.seed)
    rows = dict(policy.describe())
    return policy, f"{rows['parameters']}; trainable {rows['trainable']}; on {policy.device}"


def fit_micro_batch(config: TrainConfig, policy: Policy) -> tuple[int, str]:
    update, others = config.update, config.simulator.num_envs * GPU_BYTES_PER_RENDERER
    share = -(-update.batch_size // int(os.environ.get("WORLD_SIZE", "1")))
    size = fit_to_memory(policy, update.gradient_checkpointing, update.micro_batch_size, share, others)
    return size, f"{size} decisions at a time"


def load_policy(
    model: ModelConfig, task_suite: str, lora_rank: int = 16, lora_alpha: int = 16, seed: int = 0
) -> Policy:
    """The pretrained policy with fresh adapters, or a trained one. Raises BadInput."""
    assert model.checkpoint is not None, "check_device, or parse_eval, has asked for one"
    return Policy.load(
        model.checkpoint, task_suite=task_suite, unnorm_key=model.unnorm_key, device=model.device, dtype=model.dtype,
        compile=model.compile, memory_budget=model.memory_budget, lora_rank=lora_rank, lora_alpha=lora_alpha, seed=seed,
    )  # fmt: skip


def env_spec(task: TaskConfig, simulator: SimulatorConfig, num_images: int) -> EnvSpec:
    """The simulator's recipe: the configured tasks, with the cameras that the policy reads. Raises BadInput."""
    suite, ids, cap = task.task_suite, task.task_ids, simulator.max_env_steps
    return EnvSpec(suite, ids, num_images, simulator.assets, simulator.bddl_file, cap)


def weights_fingerprint(policy: Policy) -> str:
    """A hash of a policy's weights: samples of the frozen ones (`vla.weights.fingerprint`), all of the trained ones."""
    digest = hashlib.sha256(policy.base_fingerprint.encode())
    for name, parameter in policy.named_trainable_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def save_model_view(path: Path, observation: Observation, policy: Policy) -> None:
    """Write the images as the network sees them: after JPEG, resize and crop."""
    try:
        imageio.imwrite(path, np.concatenate(list(policy.view(observation)), axis=1))
    except OSError as error:
        log.warning("%s could not be written (%s)", path.name, first_line(error))


def log_setup(
    config: TrainConfig, policy: Policy, spec: EnvSpec, tasks: Sequence[TaskInfo], teacher: Sequence[str], folder: Path,
    checks: Checks,
) -> None:  # fmt: skip
    """Say what is about to run: policy, teacher (its mode, and why), tasks, looks, folder, and what was found."""
    update = config.update
    rows = [
        *policy.describe(),
        ("update", f"{update.batch_size} decisions a step, {update.micro_batch_size} at a time on each device"),
        ("teacher", ": ".join(teacher)),
        *((f"task {task.task_id}", f"{task.instruction} (at most {task.max_env_steps} env steps)") for task in tasks),
        ("assets", describe_assets(spec.assets)),
        ("run folder", str(folder)),
        ("checks", checks.summary()),
        *(("warning", f"{found.check}: {found.text}") for found in checks.findings if found.status == "warning"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        log.info("%s  %s", name.ljust(width), value)
