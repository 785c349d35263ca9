"""Set up a run and check every part of it: machine, tasks, checkpoint, memory, simulators and policy.

A check takes what it checks and returns a `Check`, a line that may be a warning. It raises BadInput for a failure, in
one line that says how to repair it. `--check-only` prints the lines and stops where training would begin.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from configs.cli import Command
from configs.config import TrainConfig, changed
from configs.sections import ModelConfig, PhaseConfig, TaskConfig
from contracts import BadInput, Observation
from envs.assets import METAWORLD_LOOKS, Pack, find_pack
from envs.pool import Pool, make_pool
from envs.rendering import MIN_CONTRAST
from envs.tasks import split_suite
from experiment.checklist import Check, Checks
from experiment.cost import estimate_cost
from experiment.first_observations import (
    FirstObservations,
    first_observations,
    instruction_of_another_task,
)
from experiment.machine_checks import check_disk, check_machine, check_main_memory, check_output
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
from experiment.speed import Speed, measure_speed
from experiment.start_times import StartTimes
from experiment.validation import student_equals_teacher
from rl import selfcheck
from rl.phases import phase_at, settle_warmup
from rl.ranks import join_ranks
from rl.sensitivity import decision_changes
from rl.update import make_learner
from vla.adapter_folder import base_and_adapter
from vla.checkpoint import CheckpointInfo
from vla.dataset_statistics import select_key, suites_named
from vla.policy import Policy

# Nats a token by which another image must move the first decision of a policy that looks. Policies that looked had 0.5
# and more, one that did not 0.002 and less (docs/LOG.md).
SMALLEST_IMAGE_EFFECT = 0.05
# --check-only starts no more, so that it can say that main memory is short without running out of it.
MAX_SIMULATORS_OF_A_CHECK = 2


@contextmanager
def set_up(command: Command, times: StartTimes) -> Iterator[Setup]:
    """Set up a run for the block, but not its folder. What fails without loading the policy comes first.

    Raises BadInput at the first failure.
    """
    check_output(command.config, command.resume)
    times.begin("assets")
    config = settle_settings(command.config)
    task = config.task
    checks = Checks(times, printed=command.check_only)
    renderer = check_machine(checks, config.model, config.simulator)
    times.begin("tasks")
    tasks = find_tasks(task, config.simulator)
    checks.add("tasks", "; ".join(f"{info.task_id} {info.instruction}" for info in tasks))

    ranks = join_ranks(config.model.device)
    times.begin("weights")
    policy = load_policy(config.model, task.task_suite, config.update.lora_rank, config.run.seed)
    checks.add("weights", describe_weights(policy))
    checks.run("looks", check_looks, policy.info, find_pack(config.simulator.assets))
    checks.run("suite", check_suite, policy.info, config.model, task.task_suite)
    if command.resume is None:
        checks.run("disk", check_disk, config.run, policy)
    times.begin("teacher")
    teacher = load_teacher(policy, config.model, config.phases, task.task_suite, config.loss.kl_coef)
    checks.add("teacher", f"{teacher.mode}: {teacher.why}")

    simulators = count_for_training(config, tasks, policy.device, renderer, ranks)
    checks.add("simulators", simulators.reason)
    checks.run("host memory", check_main_memory, simulators)
    times.begin("memory plan")
    micro_batch_size = fit_micro_batch(policy, config.update, simulators.gpu_gib, ranks, tasks[0].instruction)
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
        observation, speed = try_out(checks, settled, policy, pool)
        state = first_state(settled, command.resume, learner)
        cost = estimate_cost(settled, tasks, speed, state, student_equals_teacher(learner))
        checks.add("this run", str(cost))
        yield Setup(settled, tasks, learner, pool, state, observation, checks)
    ranks.leave()


def try_out(checks: Checks, config: TrainConfig, policy: Policy, pool: Pool) -> tuple[Observation, Speed]:
    """Check what a simulator shows and what the policy makes of it. Raises BadInput.

    Returns the first observation, and how fast this machine is.
    """
    checks.times.begin("first frame")
    observations = first_observations(pool, config.task)
    checks.run("first frame", check_first_frame, observations.first.images)
    if config.loss.advantage == "gae" and observations.first.state is None:
        raise BadInput(
            "--advantage gae needs Observation.state, which this simulator does not give: use batch"
        )
    pool.start_building(config.task.task_ids)
    check_policy(checks, config, policy, observations)
    checks.times.begin("other simulators")
    pool.wait_until_built()  # also because the speed is measured next
    checks.times.begin("speed")
    speed = measure_speed(policy, pool, observations.first, config)
    checks.add("speed", str(speed))
    return observations.first, speed


def check_policy(
    checks: Checks, config: TrainConfig, policy: Policy, observations: FirstObservations
) -> None:
    """Check the policy for faults that raise no error by themselves (`rl.selfcheck`)."""
    observation = observations.first
    allow_zero_baseline = config.evaluation.allow_zero_baseline
    checks.run("attention", selfcheck.attention_probe, policy, observation)
    checks.run("images", selfcheck.image_probe, policy, observation)
    checks.run("token head", check_token_head, policy, observation, config.phases, allow_zero_baseline)
    checks.run("log-probs", selfcheck.check_logits_path, policy, observation, config.rollout.temperature)
    checks.run("learning", selfcheck.check_learning, policy, observation, int(config.update.micro_batch_size))
    # Last, because a prompt of another length makes torch compile code for all lengths from then on.
    checks.run("eyes", check_eyes, policy, observations, config.task)


def describe_weights(policy: Policy) -> str:
    """What the checkpoint is, what it reads, where it is, and how many parameters it has."""
    rows = dict(policy.describe())
    parts = [rows["kind"], f"reads {rows['reads']}", rows["parameters"], f"trainable {rows['trainable']}"]
    return "; ".join([*parts, f"on {policy.device}", str(policy.info.weights_folder)])


def check_looks(info: CheckpointInfo, pack: Pack) -> Check:
    """Warn if the policy will see other looks than in its training.

    A checkpoint that names no looks is assumed to have been trained on LIBERO's own, or on the only ones of Meta-World.
    """
    in_metaworld = pack.name == METAWORLD_LOOKS
    trained_on = info.looks or (METAWORLD_LOOKS if in_metaworld else "official",)
    if pack.looks in trained_on:
        return Check("ok", str(pack))
    choices = () if in_metaworld else [looks for looks in trained_on if looks != METAWORLD_LOOKS]
    names = [
        looks if looks in ("official", "lowpoly") else f"the folder of pack {looks}" for looks in choices
    ]
    repair = f"use --assets {' or '.join(names)}" if names else "use another --checkpoint"
    assumed = "" if info.looks else " (assumed, because its folder does not say)"
    return Check(
        "warning", f"{pack}, but the policy was trained on {' and '.join(trained_on)}{assumed}; {repair}"
    )


def check_suite(info: CheckpointInfo, model: ModelConfig, task_suite: str) -> Check:
    """Show the ranges of actions, and warn if their key or the checkpoint's name belongs to another suite."""
    task_suite, _ = split_suite(task_suite)
    key = select_key(info.statistics_folder, info.statistics, task_suite, model.unnorm_key)
    action = info.statistics[key].action
    low = " ".join(f"{value:.2f}" for value in action.q01)
    high = " ".join(f"{value:.2f}" for value in action.q99)
    text = f"{key}: actions from [{low}] to [{high}]"
    base, _ = base_and_adapter(str(model.checkpoint))
    for name, repair in ((key, "leave out --unnorm-key"), (Path(base).name, "use another --task-suite")):
        suites = suites_named(name)
        if suites and task_suite not in suites:
            mismatch = f"{name} is of another suite than the tasks ({task_suite}), and will rarely succeed"
            return Check("warning", f"{text}; {mismatch}: {repair}, or use another --checkpoint")
    return Check("ok", text)


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


def check_eyes(policy: Policy, observations: FirstObservations, task: TaskConfig) -> Check:
    """Measure what the first decision depends on, and warn if the images hardly matter.

    The tokens of a head that was not trained on action tokens say nothing about that, so they are not measured.
    """
    if selfcheck.action_mass(policy, observations.first) < selfcheck.SMALLEST_ACTION_MASS:
        return Check("ok", "not measured, because the token head was not trained on action tokens")
    if not observations.from_other_starts:
        return Check("ok", "not measured, because the simulator shows no other image of the task")
    other_instruction = instruction_of_another_task(task)
    changes = decision_changes(policy, observations.first, observations.from_other_starts, other_instruction)
    other_image = changes.pop("another image")
    listed = "".join(f", {name} by {nats:.3f}" for name, nats in changes.items())
    text = f"another image moves the decision by {other_image:.3f} nats a token{listed}"
    if other_image < SMALLEST_IMAGE_EFFECT:
        return Check(
            "warning",
            f"{text}: the policy hardly looks, so it can succeed only where objects stand as in its training; use a "
            "checkpoint that looks (python -m benchmarks.eyes measures it)",
        )
    return Check("ok", text)
