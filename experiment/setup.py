"""Build all parts of a run, straight down: tasks, policy, teacher, memory plan, learner, simulators, and the folder."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import imageio.v2 as imageio
import numpy as np

from configs.config import TrainConfig, changed
from configs.presets import TINY_CHECKPOINT
from configs.sections import SimulatorConfig, TaskConfig
from contracts import GIB, BadInput, Observation, resolve_pointer
from envs.assets import find_pack
from envs.env import EnvSpec, Start, TaskInfo
from envs.pool import Pool, make_pool, task_info
from envs.tasks import bddl_task
from experiment.checkpoints import TrainerState, latest_checkpoint, load_checkpoint, save_checkpoint
from experiment.policies import choose_and_keep_teacher, choose_looks, describe_policy, load_policy
from experiment.resume import reopen_run
from experiment.run_folder import Run, start_run
from experiment.simulators import SimulatorCount, count_for_training, find_renderer_apart
from experiment.terminal import log_row
from rl.ranks import Ranks, join_ranks
from rl.teacher_choice import settle_warmup
from rl.update import Learner, make_learner
from vla.hub import commit_of
from vla.memory import Plan, RolloutSize, plan_update
from vla.policy import Policy


@dataclass(frozen=True)
class Setup:
    """The parts of a run. Its folder is not open yet."""

    config: TrainConfig  # with numbers and names in place of `auto` where it decides what is computed
    learner: Learner
    pool: Pool
    observation: Observation  # the first one of the first task


@contextmanager
def set_up(config: TrainConfig) -> Iterator[Setup]:
    """Build the parts of a run for the block, and log a row for each. Raises BadInput.

    What fails without loading the policy comes first.
    """
    config = resolve_names(config)
    task = config.task
    tasks = find_tasks(task, config.simulator)
    log_tasks(config, tasks)
    renderer = find_renderer_apart(config.simulator.simulators)
    log_row("renderer", renderer)

    ranks = join_ranks(config.model.device)
    update = config.update
    policy = load_policy(
        config.model, task.task_suite, update.lora_rank, config.run.seed, update.trained_blocks
    )
    teacher = choose_and_keep_teacher(policy, config)
    simulators = count_for_training(config, tasks, policy.device, renderer, ranks)
    plan = plan_memory(policy, config, simulators, ranks, tasks[0])
    config = changed(config, num_envs=simulators.num_envs, micro_batch_size=plan.micro_batch_size)
    config = settle_warmup(config, teacher.mode, policy.is_laplace)
    learner = make_learner(policy, config, ranks, teacher.mode)

    for name, text in describe_policy(policy):
        log_row(name, text)
    log_row("teacher", f"{teacher.mode}: {teacher.why}")
    log_row("simulators", simulators.reason)
    log_row("update", f"{update.batch_size} decisions a step, {plan.micro_batch_size} at a time")

    spec = make_spec(task.task_suite, task.task_ids, config.simulator, policy.num_images)
    prepare = policy.model_inputs.prepare_images
    with make_pool(spec, simulators.num_envs, prepare, config.simulator.simulators) as pool:
        yield Setup(config, learner, pool, first_observation(pool, task))
    ranks.leave()


def resolve_names(config: TrainConfig) -> TrainConfig:
    """Replace `auto` where no policy is needed for it, and a pointer such as `best` by the checkpoint that it names.

    Paths become absolute, because the run may go on in another folder.
    """
    advantage = config.loss.advantage
    if advantage == "auto":
        advantage = "gae" if len(config.task.task_ids) > 1 else "batch"  # a guess (docs/LOG.md)
    bddl_file = config.simulator.bddl_file
    return changed(
        config,
        advantage=advantage,
        bddl_file=bddl_file and str(Path(bddl_file).absolute()),
        assets=choose_looks(config.simulator.assets, config.model),
        checkpoint=absolute(str(resolve_pointer(Path(str(config.model.checkpoint))))),
    )


def absolute(name: str) -> str:
    """The absolute path of a local folder.

    Hub ids are unchanged, and so is the name of the bundled policy, which is found from any folder.
    """
    folder = Path(name).expanduser()
    return str(folder.absolute()) if folder.is_dir() and name != TINY_CHECKPOINT else name


def plan_memory(
    policy: Policy, config: TrainConfig, simulators: SimulatorCount, ranks: Ranks, task: TaskInfo
) -> Plan:
    """Choose how an update fits into GPU memory, of which simulators take a part. Raises BadInput if nothing fits."""
    rollout = config.rollout
    env_steps = 2 * rollout.n_steps if rollout.dynamic_sampling else rollout.n_steps
    # Episodes that are still running then play to their ends, those of a begun group all (`rl.episode_order`).
    env_steps += (simulators.num_envs - 1 + rollout.group_size) * ranks.size * task.max_env_steps
    return plan_update(
        policy,
        config.update.micro_batch_size,
        math.ceil(config.update.batch_size / ranks.size),
        simulators.gpu_gib * GIB,
        task.instruction,
        rollout=RolloutSize(math.ceil(env_steps / policy.chunk_length), 0.5 * simulators.left_gib * GIB),
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


def log_tasks(config: TrainConfig, tasks: Sequence[TaskInfo]) -> None:
    for task in tasks:
        log_row(f"task {task.task_id}", f"{task.instruction} (at most {task.max_env_steps} env steps)")
    if config.simulator.bddl_file is not None:
        log_row("initial states", bddl_task(config.simulator.bddl_file).init_states_source)
    log_row("assets", str(find_pack(config.simulator.assets)))


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
    )


def first_observation(pool: Pool, task: TaskConfig) -> Observation:
    """Reset a simulator to the first task and return its observation. Raises BadInput if the simulator fails."""
    states = task.train_init_states
    first_state = states[0] if isinstance(states, tuple) else None
    pool.reset(0, task.task_ids[0], Start(first_state))
    ((_, result),) = pool.ready()
    if result.observation is None:
        raise BadInput(
            f"the simulator failed at its first reset (task {task.task_ids[0]}: {result.error}): see the messages "
            "above; to repair the installation run: pip install --no-deps -r requirements-simulator.txt"
        )
    return result.observation


def open_run(setup: Setup, resume: str | None, argv: Sequence[str]) -> tuple[Run, TrainerState]:
    """Start a new run, or reopen the folder `resume` at its latest checkpoint. Raises BadInput if it cannot."""
    learner = setup.learner
    if resume is not None:
        state = load_checkpoint(latest_checkpoint(Path(resume)), learner)
        run = reopen_run(Path(resume), setup.config, argv, state.metrics_bytes, state.wandb_id, learner.ranks)
    else:
        state = TrainerState(ranks=learner.ranks.size, looks=find_pack(setup.config.simulator.assets).looks)
        run = start_run(setup.config, argv, learner.ranks, commit_of(learner.policy.info.weights_folder))
    # A run that wandb did not record so far may have got its id only now.
    state.wandb_id = run.wandb.id
    log_row("run folder", str(run.folder))
    log_row("report", f"{run.folder / 'report' / 'index.html'}, written after every evaluation")
    return run, state


def save_first_files(setup: Setup, run: Run, state: TrainerState) -> None:
    """Write the files of a new run before its first update: the first frame, and a checkpoint to resume from."""
    learner = setup.learner
    if learner.ranks.is_main:
        # The images side by side, as the network sees them: after JPEG, resize and crop.
        images = list(learner.policy.model_inputs.images_of(setup.observation))
        imageio.imwrite(run.folder / "first_frame.png", np.concatenate(images, axis=1))
    save_checkpoint(run.checkpoints, learner, state, setup.config.run.keep_checkpoints)
