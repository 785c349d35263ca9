"""The checks before the first episode: each finding is one line, with the command that repairs it where one is needed.

A training run stops at the first failure; `--check-only` goes on with all that it leaves possible.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import imageio.v2 as imageio
import numpy as np
import torch

from configs.config import (
    EvalConfig,
    ModelConfig,
    RunConfig,
    SimulatorConfig,
    TaskConfig,
    TrainConfig,
    UpdateConfig,
    require,
)
from contracts import BadInput, Observation, SelfCheckError, first_line
from envs.assets import METAWORLD_LOOKS, find_pack, installed_official
from envs.env import EnvSpec
from envs.pool import Pool, make_pool, task_info
from envs.rendering import REPAIR, check_versions, find_renderer, simulator_versions
from envs.tasks import METAWORLD, TaskInfo
from envs.worker import NoAnswer, ask
from rl import selfcheck
from rl.phases import Teacher, choose_teacher, phase_at
from rl.selfcheck import Caution
from vla.checkpoint import CheckpointInfo, base_and_adapter, inspect_checkpoint
from vla.dataset_statistics import same_actions, select_key, suites_named
from vla.device import GIB, choose_device, is_large
from vla.hub import resolve_checkpoint
from vla.loading import LoadOptions
from vla.memory import fit_to_memory
from vla.policy import Policy

log = logging.getLogger(__name__)
MIN_CONTRAST = 5.0  # standard deviation of a frame's pixel values, 0..255; an empty frame has none
COPIES_IN_CHECKPOINT = 3  # of every trained number, float32: itself and AdamW's two moments
RESERVE_GIB = 0.5  # of the disk, for videos, records and the report
STATUSES = ("ok", "warning", "FAILED", "skipped")
Config = TypeVar("Config", TrainConfig, EvalConfig)


class Checks:
    """Makes checks and remembers their findings. A failure is raised, or printed, with `show_all`, like all else."""

    def __init__(self, show_all: bool = False) -> None:
        self.findings: list[tuple[str, str, str]] = []  # name, status, text
        self._show_all, self._started = show_all, time.perf_counter()
        self._print = show_all and os.environ.get("RANK", "0") == "0"

    def make(self, name: str, check: Callable[[], Any], *needs: Any) -> Any:
        """Make a check; returns its value, if it gives one, or its finding. None: it failed, or one of `needs` did."""
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
                    text = (
                        f"{type(failure).__name__}: {first_line(failure)} (a fault: its traceback is above)"
                    )
        self.findings.append((name, status, text))
        if self._print:
            print(f"{status:8} {name:14} {time.perf_counter() - started:5.1f} s  {text}", flush=True)
        return value

    def summary(self) -> str:
        counts = Counter(status for _, status, _ in self.findings)
        counted = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        return f"{len(self.findings)} checks in {time.perf_counter() - self._started:.1f} s: {counted}"

    def conclude(self) -> None:
        """Print the summary. Raises BadInput when a check has failed."""
        if self._print:
            print(self.summary())
        failed = [f"{name}: {text}" for name, status, text in self.findings if status == "FAILED"]
        require(not failed, f"{len(failed)} of {len(self.findings)} checks FAILED; {' '.join(failed[:1])}")


def check_machine(checks: Checks, config: TrainConfig) -> tuple[Any, Any]:
    """What needs no policy. Returns whether there is a device for one, and whether LIBERO runs (None: no)."""
    versions = checks.make("versions", check_installed)
    device = checks.make("device", lambda: check_device(config.model))
    renderer = checks.make("rendering", check_rendering)
    envs, tasks = config.simulator, len(config.task.task_ids)
    if envs.simulators == "ray":
        checks.make("ray", check_ray)
    else:
        checks.make("host memory", lambda: check_host_memory(envs, tasks))
    return device, versions and renderer


def check_setup(checks: Checks, config: TrainConfig, policy: Policy, pool: Pool) -> Observation:
    """Before a run; returns the first observation of the first task. Raises the first failure."""
    check_checkpoint(checks, config, policy.info)
    checks.make("disk", lambda: check_disk(config.run, policy))
    observation = checks.make("first frame", lambda: check_first_frame(pool, config.task))
    check_policy(checks, config, policy, observation, config.update.micro_batch_size)
    return observation


def check_only(config: TrainConfig) -> None:
    """Make all checks and print a line for each. Raises BadInput if one failed."""
    checks = Checks(show_all=True)
    chosen = checks.make("assets", lambda: choose_looks(config))
    config = chosen or config
    device, can_simulate = check_machine(checks, config)
    info = checks.make("checkpoint", lambda: find_checkpoint(config.model), device)
    suite = check_checkpoint(checks, config, info, chosen)
    policy = checks.make("weights", lambda: load_weights(config), suite)
    checks.make("teacher", lambda: ": ".join(load_teacher(config, policy)), policy)
    micro_batch_size = checks.make("micro-batch", lambda: fit_micro_batch(config, policy), policy)
    checks.make("disk", lambda: check_disk(config.run, policy), policy)
    found = checks.make("tasks", lambda: find_tasks(config, info.num_images if info else 1))
    observation = checks.make(
        "first frame", lambda: first_frame_apart(config, found[0]), found, can_simulate and chosen
    )
    check_policy(checks, config, policy, observation, micro_batch_size)
    checks.conclude()


def check_checkpoint(checks: Checks, config: TrainConfig, info: Any, has_looks: Any = True) -> Any:
    checks.make("looks", lambda: check_looks(info, config.simulator.assets), info, has_looks)
    return checks.make("suite", lambda: check_suite(info, config.model, config.task.task_suite), info)


def check_policy(
    checks: Checks, config: TrainConfig, policy: Any, observation: Any, micro_batch_size: Any
) -> None:
    """Ask the policy what no error message would ever tell (`rl.selfcheck`)."""
    seen = observation or (policy and selfcheck.made_up_observation(policy))
    # After the warmup of an L1 head, or of another checkpoint, nothing is left of the checkpoint's token logits.
    phases, has_l1_head = config.phases, policy and policy.action_head is not None
    has_other_tokens = phases.teacher_checkpoint or (has_l1_head and phases.teacher != "greedy")
    relearns = phase_at(0, phases).distils and has_other_tokens
    needs_tokens = not (config.evaluation.allow_zero_baseline or relearns)
    checks.make("attention", lambda: selfcheck.attention_probe(policy), policy)
    checks.make("images", lambda: selfcheck.image_probe(policy), policy)
    checks.make("token head", lambda: selfcheck.token_probe(policy, seen, needs_tokens), policy, observation)
    checks.make(
        "log-probs", lambda: selfcheck.check_logits_path(policy, seen, config.rollout.temperature), policy
    )
    checks.make(
        "learning", lambda: selfcheck.check_learning(policy, seen, micro_batch_size), micro_batch_size
    )


def check_installed() -> str:
    """The versions that decide what is computed. Raises BadInput for those of the simulator that change LIBERO."""
    ours = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    finding = ", ".join(f"{name} {number}" for name, number in (ours | simulator_versions()).items())
    caution = check_versions()
    return Caution(f"{finding}: {caution}") if caution else finding


def check_device(model: ModelConfig) -> str:
    """The device's name and memory. Raises BadInput when it computes nothing, as when torch has no code for it."""
    device = choose_device(model.device, base_and_adapter(str(model.checkpoint), None)[0])
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} thread(s)"
    name = torch.cuda.get_device_name(device)
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError as error:
        repair = "see nvidia-smi; where torch has no code for it, run: pip install --upgrade torch torchvision timm"
        raise BadInput(f"{name} does not compute ({first_line(error)}): {repair}") from None
    return f"{name}, {torch.cuda.get_device_properties(device).total_memory / GIB:.0f} GiB"


def check_rendering() -> str:
    """One frame outside of LIBERO, and what drew it; software beside a GPU is a caution."""
    try:
        finding = ask(find_renderer)
    except NoAnswer as reason:
        raise BadInput(f"no frame can be rendered ({reason}); {REPAIR}") from None
    in_software = any(word in finding.lower() for word in ("llvmpipe", "softpipe", "swrast", "software"))
    slow = "renders on the CPU, slowly, although there is a GPU; run: unset MUJOCO_GL PYOPENGL_PLATFORM"
    return Caution(f"{finding} {slow}; {REPAIR}") if in_software and torch.cuda.is_available() else finding


def check_ray() -> str:
    """Join the cluster: what it has. Raises BadInput."""
    from envs.ray_workers import connect  # which imports what is not always installed

    return connect()


def simulators_gib(simulator: SimulatorConfig, num_tasks: int) -> tuple[float, float]:
    """Main memory of simulators here, and of a GPU (8 low-poly ones: 1.0 GiB, 15 official 8.3, 16 of 10 tasks 66)."""
    built = min(num_tasks, simulator.kept_tasks)
    here = simulator.num_envs if simulator.simulators == "processes" else 0  # Ray chooses the nodes of others
    light = simulator.assets in ("lowpoly", METAWORLD_LOOKS)
    main, of_gpu = (0.3 + 0.2 * built, 0.13 * built) if light else (0.6 + 0.6 * built, 0.15 + 0.4 * built)
    return here * main, here * of_gpu


def check_host_memory(simulator: SimulatorConfig, num_tasks: int) -> str:
    available_kib = re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[0]
    free, needed = int(available_kib) / 2**20, simulators_gib(simulator, num_tasks)[0]
    finding = f"{free:.1f} GiB are free, {simulator.num_envs} simulator(s) will take about {needed:.1f}"
    return Caution(f"{finding}: lower --num-envs or --kept-tasks") if free < needed else finding


def check_disk(run: RunConfig, policy: Policy) -> str:
    output = Path(run.output).absolute()
    free = (
        shutil.disk_usage(next(folder for folder in (output, *output.parents) if folder.is_dir())).free / GIB
    )
    trained = sum(parameter.numel() for _, parameter in policy.named_trainable_parameters())
    kept = run.keep_checkpoints + 2  # and `best`, and one that is being written
    needed = 4 * trained * COPIES_IN_CHECKPOINT * kept / GIB + RESERVE_GIB
    finding = f"{free:.1f} GiB are free in {output}, {kept} checkpoints and records take {needed:.1f}"
    require(
        free >= needed, f"{finding}: name a folder on another disk with --output, or lower --keep-checkpoints"
    )
    return finding


def find_checkpoint(model: ModelConfig) -> tuple[CheckpointInfo, str]:
    base, adapter = base_and_adapter(str(model.checkpoint), None)
    info = inspect_checkpoint(resolve_checkpoint(base), adapter=adapter)
    reads = f"{info.num_images} image(s) and {'' if info.uses_proprio else 'no '}proprio"
    return info, f"{info.kind}; reads {reads}; {info.folder}"


def check_suite(info: CheckpointInfo, model: ModelConfig, task_suite: str) -> str:
    """The ranges of actions in force, and whether they and the checkpoint's name are those of the suite."""
    key = select_key(info.statistics, task_suite, model.unnorm_key)
    base, _ = base_and_adapter(str(model.checkpoint), None)
    action = info.statistics[key].action
    low, high = (" ".join(f"{v:.2f}" for v in bound) for bound in (action.q01, action.q99))
    finding = f"{key}: actions from [{low}] to [{high}]"
    for name, repair in ((key, "leave out --unnorm-key"), (Path(base).name, "use another --task-suite")):
        if suites_named(name) and task_suite not in suites_named(name):
            other = f"{name} is of another suite than the tasks ({task_suite}), and has no success as a rule"
            return Caution(f"{finding}; {other}: {repair}, or use another --checkpoint")
    return finding


def choose_looks(config: Config) -> tuple[Config, str]:
    """The configuration with the looks that `--assets auto` stands for, and which they are. Raises BadInput."""
    assets, model = config.simulator.assets, config.model
    suites = config.suites if isinstance(config, EvalConfig) else (config.task.task_suite,)
    if METAWORLD in suites:
        assets = METAWORLD_LOOKS
    if assets == "auto":  # a 7B knows LIBERO's own; on a CPU they cost a small policy two thirds of its speed
        assets = "official"
        if not is_large(Path(base_and_adapter(str(model.checkpoint), None)[0]).expanduser()):
            has_gpu = model.device != "cpu" and torch.cuda.is_available()
            known = find_checkpoint(model)[0].looks or ("official",)
            assets = "official" if has_gpu and installed_official() and "official" in known else "lowpoly"
    pack = find_pack(assets)
    return replace(config, simulator=replace(config.simulator, assets=assets)), f"{pack}: {pack.folder}"


def check_looks(info: CheckpointInfo, assets: str) -> str:
    """Whether the policy will see what it was trained on: LIBERO's own, where its folder does not say."""
    pack, known = find_pack(assets), info.looks or ("official",)
    if pack.looks in known:
        return str(pack)
    repair = " or ".join(
        look if look in ("official", "lowpoly", "metaworld") else f"the folder of pack {look}"
        for look in known
    )
    said = "" if info.looks else ", as most were: its folder does not say"
    return Caution(
        f"{pack}, but the policy was trained on {' and '.join(known)}{said}; use --assets {repair}"
    )


def find_tasks(config: TrainConfig, num_images: int) -> tuple[tuple[EnvSpec, list[TaskInfo]], str]:
    """The simulators' recipe and the tasks, each of which has the initial states that the configuration uses."""
    task, simulator = config.task, config.simulator
    assets, bddl_file, cap, kept = (
        simulator.assets,
        simulator.bddl_file,
        simulator.max_env_steps,
        simulator.kept_tasks,
    )
    spec = EnvSpec(task.task_suite, task.task_ids, num_images, assets, bddl_file, cap, kept)
    needed, lower = task.eval_init_states[1], "--train-init-states, --eval-init-states"
    if isinstance(task.train_init_states, tuple):
        needed = max(needed, task.train_init_states[1])
    for info in (tasks := task_info(spec)):
        few = (
            f"task {info.task_id} ({info.name}) has only {info.num_init_states} initial states: lower {lower}"
        )
        require(needed <= info.num_init_states, few)
    return (spec, tasks), "; ".join(f"{info.task_id} {info.instruction}" for info in tasks)


def check_first_frame(pool: Pool, task: TaskConfig) -> tuple[Observation, str]:
    states = task.train_init_states
    pool.reset(0, task.task_ids[0], states[0] if isinstance(states, tuple) else None)
    ((_, result),) = pool.ready()
    if result.observation is None:
        repair = "look at the messages above; run: pip install --no-deps -r requirements-simulator.txt"
        raise BadInput(
            f"the simulator failed at its first reset (task {task.task_ids[0]}: {result.error}), {repair}"
        )
    images = result.observation.images
    contrast = min(float(image.std()) for image in images)
    finding = (
        f"{len(images)} camera(s), {images.shape[2]} x {images.shape[1]} pixels, contrast {contrast:.1f}"
    )
    empty = "a rendered frame is empty: check the GL driver (try MUJOCO_GL=osmesa), or --assets"
    require(contrast >= MIN_CONTRAST, f"{finding}: {empty}")
    return result.observation, finding


def first_frame_apart(config: TrainConfig, spec: EnvSpec) -> tuple[Observation, str]:
    """The same in a process of its own: a simulator that hangs or crashes is a finding, too."""
    on_ray = config.simulator.simulators == "ray"
    with make_pool(spec, 1, simulators="ray") if on_ray else Pool(spec, 1) as pool:
        return check_first_frame(pool, config.task)


def load_weights(config: TrainConfig) -> tuple[Policy, str]:
    policy = load_policy(config.model, config.task.task_suite, config.update, config.run.seed)
    rows = dict(policy.describe())
    return policy, f"{rows['parameters']}; trainable {rows['trainable']}; on {policy.device}"


def fit_micro_batch(config: TrainConfig, policy: Policy) -> tuple[int, str]:
    update, others = config.update, int(simulators_gib(config.simulator, len(config.task.task_ids))[1] * GIB)
    share = -(-update.batch_size // int(os.environ.get("WORLD_SIZE", "1")))
    size = fit_to_memory(policy, update.gradient_checkpointing, update.micro_batch_size, share, others)
    return size, f"{size} decisions at a time"


def load_policy(
    model: ModelConfig, suite: str, update: UpdateConfig = TrainConfig.update, seed: int = 0
) -> Policy:
    """The pretrained policy with fresh adapters, or a trained one. Raises BadInput."""
    options = LoadOptions(
        task_suite=suite,
        unnorm_key=model.unnorm_key,
        lora_rank=update.lora_rank,
        seed=seed,
        device=model.device,
        memory_budget=model.memory_budget,
        frozen_weights=model.frozen_weights,
        compile=model.compile,
    )
    return Policy.load(str(model.checkpoint), options)


def load_teacher(config: TrainConfig, policy: Policy) -> Teacher:
    """Give the policy the teacher that --teacher names; how it decides, and why. Raises BadInput."""
    model = config.model
    checkpoint = config.phases.teacher_checkpoint or str(model.checkpoint)
    _, adapter = base_and_adapter(checkpoint, None)
    if adapter is not None or config.phases.teacher_checkpoint is not None:
        try:
            if adapter is None or not policy.use_teacher_adapter(adapter):
                small = replace(config.update, lora_rank=1)  # adapters that nobody trains
                policy.use_teacher(
                    load_policy(replace(model, checkpoint=checkpoint), config.task.task_suite, small)
                )
        except BadInput as problem:
            raise BadInput(f"--teacher {checkpoint}: {problem}") from None
    with policy.teacher() as teacher:
        has_l1_head = teacher.action_head is not None and adapter is None  # an adapter was trained on tokens
        same_tokens = teacher is policy or same_actions(teacher.statistics.action, policy.statistics.action)
        return choose_teacher(config, has_l1_head, same_tokens)


def weights_fingerprint(policy: Policy) -> str:
    """A hash of a policy's weights: samples of the frozen ones (`vla.weights.fingerprint`), all of the trained ones."""
    trained = ((name, p.detach().float().cpu().numpy()) for name, p in policy.named_trainable_parameters())
    numbers = b"".join(name.encode() + values.tobytes() for name, values in trained)
    return hashlib.sha256(policy.base_fingerprint.encode() + numbers).hexdigest()


def save_model_view(path: Path, observation: Observation, policy: Policy) -> None:
    """Write the images as the network sees them: after JPEG, resize and crop."""
    imageio.imwrite(path, np.concatenate(list(policy.view(observation)), axis=1))


def log_setup(
    config: TrainConfig,
    policy: Policy,
    tasks: Sequence[TaskInfo],
    teacher: Sequence[str],
    folder: Path,
    checks: Checks,
) -> None:
    """Say what is about to run: policy, teacher (its mode, and why), tasks, looks, folder, and what was found."""
    rows = [
        *policy.describe(),
        (
            "update",
            f"{config.update.batch_size} decisions a step, {config.update.micro_batch_size} at a time",
        ),
        ("teacher", ": ".join(teacher)),
        *(
            (f"task {task.task_id}", f"{task.instruction} (at most {task.max_env_steps} env steps)")
            for task in tasks
        ),
        ("assets", str(find_pack(config.simulator.assets))),
        ("run folder", str(folder)),
        ("checks", checks.summary()),
        *(("warning", f"{name}: {text}") for name, status, text in checks.findings if status == "warning"),
    ]
    for name, value in rows:
        log.info("%-14s  %s", name, value)
