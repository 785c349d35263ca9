"""Set up a run and check every part of it: machine, tasks, checkpoint, memory, simulators and policy.

A check takes what it checks and returns a `Check`, a line that may be a warning. It raises BadInput for a failure, in
one line that says how to repair it. `--check-only` prints the lines and stops where training would begin.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from configs.cli import Command
from configs.config import TrainConfig, changed
from configs.sections import PhaseConfig, TaskConfig
from contracts import BadInput, Observation
from envs.assets import Pack, find_pack
from envs.env import Start
from envs.pool import Pool, make_pool
from experiment.checklist import Check, Checks
from experiment.machine_checks import check_machine, check_main_memory, check_output
from experiment.setup import (
    Setup,
    find_tasks,
    first_state,
    fit_micro_batch,
    load_policy,
    load_teacher,
    make_spec,
    settle_settings,
)
from experiment.simulators import count_for_training
from rl import selfcheck
from rl.phases import phase_at, settle_warmup
from rl.ranks import join_ranks
from rl.update import make_learner
from vla.checkpoint import CheckpointInfo
from vla.policy import Policy

MIN_CONTRAST = 5.0  # least standard deviation of a frame's pixel values (0 to 255); in an empty frame it is 0
# --check-only starts no more, so that it can say that main memory is short without running out of it.
MAX_SIMULATORS_OF_A_CHECK = 2


@contextmanager
def set_up(command: Command) -> Iterator[Setup]:
    """Set up a run for the block, but not its folder. What fails without loading the policy comes first.

    Raises BadInput at the first failure.
    """
    check_output(command.config, command.resume)
    config = settle_settings(command.config)
    task = config.task
    checks = Checks(printed=command.check_only)
    renderer = check_machine(checks, config.model, config.simulator)
    tasks = find_tasks(task, config.simulator)
    checks.add("tasks", "; ".join(f"{info.task_id} {info.instruction}" for info in tasks))

    ranks = join_ranks(config.model.device)
    update = config.update
    policy = load_policy(
        config.model, task.task_suite, update.lora_rank, config.run.seed, update.trained_blocks
    )
    checks.add("weights", describe_weights(policy))
    checks.run("looks", check_looks, policy.info, find_pack(config.simulator.assets))
    teacher = load_teacher(policy, config.model, config.phases, task.task_suite, config.loss.kl_coef)
    checks.add("teacher", f"{teacher.mode}: {teacher.why}")

    simulators = count_for_training(config, tasks, policy.device, renderer, ranks)
    checks.add("simulators", simulators.reason)
    checks.run("host memory", check_main_memory, simulators)
    micro_batch_size = fit_micro_batch(policy, config, simulators, ranks, tasks[0])
    checks.add("memory plan", f"{micro_batch_size} decisions at a time")
    numbers = {"num_envs": simulators.num_envs, "micro_batch_size": micro_batch_size}
    settled = settle_warmup(changed(config, **numbers), teacher.mode)
    learner = make_learner(policy, settled, ranks, teacher.mode)

    spec = make_spec(task.task_suite, task.task_ids, config.simulator, policy.num_images)
    prepare = policy.model_inputs.prepare_images
    num_envs = simulators.num_envs
    if command.check_only:
        num_envs = min(num_envs, MAX_SIMULATORS_OF_A_CHECK)
    with make_pool(spec, num_envs, prepare, config.simulator.simulators) as pool:
        observation = try_out(checks, settled, policy, pool)
        state = first_state(settled, command.resume, learner)
        yield Setup(settled, tasks, learner, pool, state, observation, checks)
    ranks.leave()


def try_out(checks: Checks, config: TrainConfig, policy: Policy, pool: Pool) -> Observation:
    """Check what a simulator shows and what the policy makes of it. Returns the first observation. Raises BadInput."""
    observation = first_observation(pool, config.task)
    checks.run("first frame", check_first_frame, observation.images)
    if config.loss.advantage == "gae" and observation.state is None:
        raise BadInput(
            "--advantage gae needs Observation.state, which this simulator does not give: use batch"
        )
    pool.start_building(config.task.task_ids)
    check_policy(checks, config, policy, observation)
    pool.wait_until_built()
    return observation


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


def check_policy(checks: Checks, config: TrainConfig, policy: Policy, observation: Observation) -> None:
    """Check the policy for faults that raise no error by themselves (`rl.selfcheck`)."""
    allow_zero_baseline = config.evaluation.allow_zero_baseline
    checks.run("attention", selfcheck.attention_probe, policy, observation)
    checks.run("images", selfcheck.image_probe, policy, observation)
    checks.run("token head", check_token_head, policy, observation, config.phases, allow_zero_baseline)
    checks.run("log-probs", selfcheck.check_logits_path, policy, observation, config.rollout.temperature)
    checks.run("learning", selfcheck.check_learning, policy, observation, int(config.update.micro_batch_size))


def describe_weights(policy: Policy) -> str:
    """What the checkpoint is, what it reads, where it is, and how many parameters it has."""
    rows = dict(policy.describe())
    parts = [rows["kind"], f"reads {rows['reads']}", rows["parameters"], f"trainable {rows['trainable']}"]
    return "; ".join([*parts, f"on {policy.device}", str(policy.info.weights_folder)])


def check_looks(info: CheckpointInfo, pack: Pack) -> Check:
    """Warn if the policy will see other looks than in its training.

    A checkpoint that names no looks is assumed to have been trained on LIBERO's own.
    """
    trained_on = info.looks or ("official",)
    if pack.looks in trained_on:
        return Check("ok", str(pack))
    names = [
        looks if looks in ("official", "lowpoly") else f"the folder of pack {looks}" for looks in trained_on
    ]
    repair = f"use --assets {' or '.join(names)}"
    assumed = "" if info.looks else " (assumed, because its folder does not say)"
    return Check(
        "warning", f"{pack}, but the policy was trained on {' and '.join(trained_on)}{assumed}; {repair}"
    )


def check_first_frame(images: np.ndarray) -> Check:
    """Check that no camera's image is empty; images: (num_images, H, W, 3). Raises BadInput."""
    contrast = min(float(image.std()) for image in images)
    text = f"{len(images)} camera(s), {images.shape[2]} x {images.shape[1]} pixels, contrast {contrast:.1f}"
    if contrast < MIN_CONTRAST:
        raise BadInput(
            f"{text}: a rendered frame is empty; check the GL driver (try MUJOCO_GL=osmesa), or --assets"
        )
    return Check("ok", text)


def check_token_head(
    policy: Policy, observation: Observation, phases: PhaseConfig, allow_zero_baseline: bool
) -> Check:
    """Check that the checkpoint's token head was trained, if the run needs that. Raises BadInput."""
    has_l1_teacher = policy.action_head is not None and phases.teacher in ("auto", "l1")
    has_other_teacher = phases.teacher_checkpoint is not None
    # A warmup by an L1 head or by another checkpoint trains the token head anew, so its first state does not matter.
    is_relearned = phase_at(0, phases).distils and (has_l1_teacher or has_other_teacher)
    must_be_trained = not is_relearned and not allow_zero_baseline
    return Check("ok", selfcheck.token_probe(policy, observation, must_be_trained))
