"""The parts of a run's setup: assets, policy, teacher, tasks, micro-batch and folder, each made by one function.

A function here raises BadInput only if it cannot make its value. All other checks are in preflight.py and
machine_checks.py.
"""

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import imageio.v2 as imageio
import numpy as np

from configs.config import TrainConfig, changed
from configs.sections import ModelConfig, PhaseConfig, SimulatorConfig, TaskConfig, UpdateConfig
from contracts import GIB, BadInput, Observation, resolve_pointer
from envs.assets import find_pack, installed_official
from envs.env import EnvSpec, TaskInfo
from envs.libero import LiberoEnv
from envs.pool import Pool, task_info
from envs.tasks import bddl_task, split_suite
from experiment.checklist import Checks
from experiment.checkpoints import TrainerState, latest_checkpoint, load_checkpoint, save_checkpoint
from experiment.run_folder import Run, reopen_run, start_run
from experiment.simulators import SimulatorCount, ranks_here
from rl.phases import TeacherChoice, choose_teacher
from rl.ranks import Ranks
from rl.update import Learner
from vla.adapter_folder import base_and_adapter, has_usable_l1_head
from vla.checkpoint import CheckpointInfo, inspect_checkpoint
from vla.dataset_statistics import same_actions
from vla.device import choose_device, is_large
from vla.hub import commit_of, resolve_checkpoint
from vla.loading import LoadOptions
from vla.memory import RolloutSize, plan_update
from vla.policy import Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """A run that is set up and checked, as `preflight.set_up` makes it. Its folder is not open yet."""

    config: TrainConfig  # with numbers and names in place of `auto` where it decides what is computed
    tasks: Sequence[TaskInfo]
    learner: Learner
    pool: Pool
    state: TrainerState
    observation: Observation  # the first one of the first task
    checks: Checks


def settle_settings(config: TrainConfig) -> TrainConfig:
    """Replace `auto` by its meaning for this run, and a pointer such as `best` by the checkpoint that it names now."""
    advantage = config.loss.advantage
    if advantage == "auto":
        advantage = "gae" if len(config.task.task_ids) > 1 else "batch"  # docs/LOG.md, "Fewer env steps"
    return changed(
        config,
        advantage=advantage,
        assets=choose_looks(config.simulator.assets, config.model),
        checkpoint=str(resolve_pointer(Path(str(config.model.checkpoint)))),
        teacher=str(resolve_pointer(Path(config.phases.teacher))),
    )


def choose_looks(assets: str, model: ModelConfig) -> str:
    """Replace `--assets auto` by the name of the assets; other names are returned unchanged.

    Raises BadInput if the assets are not installed.
    """
    if assets == "auto":
        assets = _automatic_looks(model)
    find_pack(assets)
    return assets


def _automatic_looks(model: ModelConfig) -> str:
    """The assets for `--assets auto`. A 7B always gets the official ones.

    Raises BadInput for a checkpoint that needs a GPU where there is none, before its assets are asked for.
    """
    base, _ = base_and_adapter(str(model.checkpoint))
    has_gpu = choose_device(model.device, base).type == "cuda"
    if is_large(Path(base).expanduser()):
        return "official"
    official_is_installed = installed_official() is not None
    return looks_of_small_policy(has_gpu, official_is_installed, find_checkpoint(model).looks)


def looks_of_small_policy(has_gpu: bool, official_is_installed: bool, trained_on: Sequence[str]) -> str:
    """Choose `official` for a small policy if there is a GPU, they are installed and it knows them; else `lowpoly`.

    On a CPU the official looks cost a small policy two thirds of its speed. `trained_on`: the looks that the checkpoint
    names; most checkpoints name none, and were trained on the official ones.
    """
    knows_official = not trained_on or "official" in trained_on
    if has_gpu and official_is_installed and knows_official:
        return "official"
    return "lowpoly"


def find_checkpoint(model: ModelConfig) -> CheckpointInfo:
    """Find the folder or hub id of --checkpoint and describe what it holds. Raises BadInput if it is not usable."""
    base, adapter = base_and_adapter(str(model.checkpoint))
    return inspect_checkpoint(resolve_checkpoint(base), adapter_folder=adapter)


def find_commit(checkpoint: str) -> str | None:
    """The hub's commit of the base of a checkpoint, which is downloaded if needed; None for a local folder."""
    base, _ = base_and_adapter(checkpoint)
    return commit_of(resolve_checkpoint(base))


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
        action_dim=LiberoEnv.action_dim,
        lora_rank=lora_rank,
        trained_blocks=None if trained_blocks == "all" else trained_blocks,
        seed=seed,
        device=model.device,
        memory_budget=model.memory_budget,
        frozen_weights=model.frozen_weights,
        compile=model.compile,
    )
    return Policy.load(str(model.checkpoint), options)


def load_teacher(
    policy: Policy, model: ModelConfig, phases: PhaseConfig, task_suite: str, kl_coef: float
) -> TeacherChoice:
    """Give the policy the teacher that --teacher names; return how it decides, and why. Raises BadInput."""
    checkpoint = phases.teacher_checkpoint or str(model.checkpoint)
    _, adapter = base_and_adapter(checkpoint)
    if phases.teacher_checkpoint is not None or adapter is not None:
        try:
            _set_teacher(policy, replace(model, checkpoint=checkpoint), adapter, task_suite)
        except BadInput as problem:
            raise BadInput(f"--teacher {checkpoint}: {problem}") from None
    with policy.teacher() as teacher:
        can_act_by_l1 = has_usable_l1_head(checkpoint, teacher.action_head)
        same_tokens = teacher is policy or same_actions(teacher.statistics.action, policy.statistics.action)
    return choose_teacher(phases, str(model.checkpoint), kl_coef, can_act_by_l1, same_tokens)


def _set_teacher(policy: Policy, teacher: ModelConfig, adapter: str | None, task_suite: str) -> None:
    """Make another checkpoint the teacher. An adapter of the same base shares the policy's frozen weights."""
    if adapter is not None and policy.use_teacher_adapter(adapter):
        return
    # The teacher's adapters are never trained, so their rank does not matter.
    policy.use_teacher(load_policy(teacher, task_suite, lora_rank=1))


def fit_micro_batch(
    policy: Policy, config: TrainConfig, simulators: SimulatorCount, ranks: Ranks, task: TaskInfo
) -> int:
    """Return the decisions per forward and backward pass that fit into GPU memory, of which simulators take a part.

    This also decides which blocks of the network recompute their activations. Raises BadInput if nothing fits.
    """
    update = config.update
    plan = plan_update(
        policy,
        update.gradient_checkpointing,
        update.micro_batch_size,
        math.ceil(update.batch_size / ranks.size),
        simulators.gpu_gib * GIB,
        task.instruction,
        rollout=rollout_size(policy, config, simulators, ranks, task),
    )
    return plan.micro_batch_size


def rollout_size(
    policy: Policy, config: TrainConfig, simulators: SimulatorCount, ranks: Ranks, task: TaskInfo
) -> RolloutSize:
    """The most decisions that a rollout should have, and half of the main memory that simulators leave to this rank."""
    rollout = config.rollout
    env_steps = 2 * rollout.n_steps if rollout.dynamic_sampling else rollout.n_steps
    env_steps += (
        simulators.num_envs * ranks.size * task.max_env_steps
    )  # of the episodes that are still running then
    left_gib = (simulators.free_gib - simulators.needed_gib) / ranks_here()
    return RolloutSize(math.ceil(env_steps / policy.chunk_length), max(0.0, 0.5 * left_gib * GIB))


def make_spec(
    task_suite: str, task_ids: tuple[int, ...], simulator: SimulatorConfig, num_images: int = 1
) -> EnvSpec:
    """The recipe from which simulators are built, for a policy that reads the images of `num_images` cameras."""
    return EnvSpec(
        task_suite,
        task_ids,
        num_images,
        simulator.assets,
        simulator.bddl_file,
        simulator.max_env_steps,
        simulator.kept_tasks,
    )


def find_tasks(task: TaskConfig, simulator: SimulatorConfig) -> list[TaskInfo]:
    """The tasks of a run. Raises BadInput if one does not exist, or has fewer initial states than are configured."""
    needed = task.eval_init_states[1]
    if isinstance(task.train_init_states, tuple):
        needed = max(needed, task.train_init_states[1])
    tasks = task_info(make_spec(task.task_suite, task.task_ids, simulator))
    for info in tasks:
        if info.num_init_states < needed:
            raise BadInput(
                f"task {info.task_id} ({info.name}) has only {info.num_init_states} initial states, and {needed} are "
                "needed: lower --train-init-states or --eval-init-states"
            )
    return tasks


def first_state(config: TrainConfig, resume: str | None, learner: Learner) -> TrainerState:
    """The state of a new run; or that of the latest checkpoint of the folder `resume`, also loaded into the learner.

    Raises BadInput for a checkpoint that cannot be used.
    """
    if resume is not None:
        return load_checkpoint(latest_checkpoint(Path(resume)), learner)
    return TrainerState(ranks=learner.ranks.size, looks=find_pack(config.simulator.assets).looks)


def open_run(setup: Setup, resume: str | None, argv: Sequence[str]) -> Run:
    """Start a new run, or reopen the folder `resume`. Raises BadInput if it cannot be created or resumed."""
    state = setup.state
    learner = setup.learner
    if resume is not None:
        run = reopen_run(Path(resume), setup.config, argv, state.metrics_bytes, state.wandb_id, learner.ranks)
    else:
        run = start_run(setup.config, argv, learner.ranks, commit_of(learner.policy.info.weights_folder))
    # A run that wandb did not record so far may have got its id only now.
    state.wandb_id = run.wandb.id
    return run


def save_first_files(setup: Setup, run: Run) -> None:
    """Write the files of a new run before its first update: the first frame, and a checkpoint to resume from."""
    learner = setup.learner
    if learner.ranks.is_main:
        save_model_view(run.folder / "first_frame.png", setup.observation, learner.policy)
    save_checkpoint(run.checkpoints, learner, setup.state, setup.config.run.keep_checkpoints)


def save_model_view(path: Path, observation: Observation, policy: Policy) -> None:
    """Write the images side by side, as the network sees them: after JPEG, resize and crop."""
    imageio.imwrite(path, np.concatenate(list(policy.model_inputs.images_of(observation)), axis=1))


def weights_fingerprint(policy: Policy) -> str:
    """Hash the policy's weights: samples of the frozen ones (`vla.weights.fingerprint`) and all trained ones."""
    digest = hashlib.sha256(policy.base_fingerprint.encode())
    for name, parameter in policy.named_trainable_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def log_setup(setup: Setup, folder: Path) -> None:
    """Log what is about to run: policy, teacher, tasks, assets, folder and warnings."""
    config = setup.config
    update = config.update
    results = setup.checks.results
    rows = setup.learner.policy.describe()
    rows.append(("update", f"{update.batch_size} decisions a step, {update.micro_batch_size} at a time"))
    rows.append(("teacher", results["teacher"].text))
    for task in setup.tasks:
        rows.append((f"task {task.task_id}", f"{task.instruction} (at most {task.max_env_steps} env steps)"))
    if config.simulator.bddl_file is not None:
        rows.append(("initial states", bddl_task(config.simulator.bddl_file).init_states_source))
    rows.append(("assets", str(find_pack(config.simulator.assets))))
    rows.append(("run folder", str(folder)))
    rows.append(("report", f"{folder / 'report' / 'index.html'}, written after every evaluation"))
    rows.append(("simulators", results["simulators"].text))
    rows.extend(setup.checks.rows())
    for name, text in rows:
        log.info("%-14s  %s", name, text)
