"""Check machine, checkpoint, simulator and policy before the first episode.

A check takes plain values, most of them made by `experiment.setup`, and returns a `Check`: a status and one line, which
says how to repair what is wrong. A training run stops at the first failure. `--check-only` prints every result and goes
on with the checks that do not need what has failed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from configs.config import (
    ModelConfig,
    PhaseConfig,
    TaskConfig,
    TrainConfig,
    changed,
)
from contracts import Observation
from envs.assets import METAWORLD_LOOKS, Pack, find_pack
from envs.env import EnvSpec
from envs.pool import Pool, make_pool
from envs.tasks import TaskInfo, split_suite
from experiment.checklist import Check, Checks
from experiment.checkpoints import TrainerState
from experiment.cost import estimate_cost
from experiment.evaluation import is_teacher
from experiment.first_observations import (
    FirstObservations,
    instruction_of_another_task,
)
from experiment.machine_checks import check_disk, check_machine, check_main_memory, check_simulators
from experiment.setup import (
    choose_looks,
    find_checkpoint,
    find_tasks,
    fit_micro_batch,
    load_policy,
    load_teacher,
    make_spec,
)
from experiment.simulators import count_for_training
from experiment.speed import FirstLook, Speed, first_look, measure_speed
from experiment.start_times import StartTimes
from rl import selfcheck
from rl.phases import Teacher, phase_at, settle_warmup
from rl.sensitivity import decision_changes
from vla.adapter_folder import base_and_adapter
from vla.checkpoint import CheckpointInfo
from vla.dataset_statistics import select_key, suites_named
from vla.policy import Policy

# Nats a token by which another image must move the first decision of a policy that looks. Policies that looked had 0.5
# and more, one that did not 0.002 and less (docs/LOG.md).
SMALLEST_IMAGE_EFFECT = 0.05
MIN_CONTRAST = 5.0  # least standard deviation of a frame's pixel values (0 to 255); in an empty frame it is 0


def check_only(config: TrainConfig, times: StartTimes) -> None:
    """Run all checks (`--check-only`) and print a line for each. Raises BadInput if one has failed."""
    checks = Checks(times, show_all=True)
    task = config.task
    suites = (task.task_suite,)
    assets = checks.make("assets", check_assets, choose_looks, config.simulator.assets, config.model, suites)
    simulator = replace(config.simulator, assets=assets or config.simulator.assets)
    config = replace(config, simulator=simulator)
    renderer = check_machine(checks, config.model, simulator)
    info = checks.make("checkpoint", check_checkpoint, find_checkpoint, config.model, after=["device"])
    checks.run("looks", check_looks, info, find_pack(assets) if assets else None)
    checks.run("suite", check_suite, info, config.model, task.task_suite)
    policy, teacher = _check_loading(checks, config)
    checks.run("disk", check_disk, config.run, policy)
    spec = make_spec(task.task_suite, task.task_ids, simulator, num_images=info.num_images if info else 1)
    tasks = checks.make("tasks", check_tasks, find_tasks, spec, task)
    if teacher is not None:
        config = settle_warmup(config, teacher.mode)
    settled = _settle_sizes(checks, config, policy, tasks, renderer)
    first = checks.make(
        "first frame",
        check_first_frame,
        first_look_apart,
        spec,
        config,
        after=["assets", "versions", "rendering", "tasks"],
    )
    observations = first.observations if first else None
    check_policy(checks, config, policy, observations, settled.update.micro_batch_size if settled else None)
    checks.run("speed", check_speed, policy, teacher, settled, tasks, first, after=["learning"])
    checks.conclude()


def _check_loading(checks: Checks, config: TrainConfig) -> tuple[Policy | None, Teacher | None]:
    """Load the policy and its teacher."""
    model = config.model
    suite = config.task.task_suite
    rank = config.update.lora_rank
    policy = checks.make(
        "weights", check_weights, load_policy, model, suite, rank, config.run.seed, after=["suite"]
    )
    kl_coef = config.loss.kl_coef
    teacher = checks.make(
        "teacher", check_teacher, load_teacher, policy, model, config.phases, suite, kl_coef
    )
    return policy, teacher


def _settle_sizes(
    checks: Checks,
    config: TrainConfig,
    policy: Policy | None,
    tasks: Sequence[TaskInfo] | None,
    renderer: str | None,
) -> TrainConfig | None:
    """Choose the number of simulators, and fit an update into the memory beside them. Returns a config with both."""
    device = policy.device if policy else None
    simulators = checks.make(
        "simulators", check_simulators, count_for_training, config, tasks, device, renderer
    )
    checks.run("host memory", check_main_memory, simulators)
    simulator = replace(config.simulator, num_envs=simulators.num_envs) if simulators else None
    micro_batch_size = checks.make(
        "micro-batch", check_micro_batch, fit_micro_batch, policy, config.update, simulator, tasks
    )
    if simulators is None or micro_batch_size is None:
        return None
    return changed(config, num_envs=simulators.num_envs, micro_batch_size=micro_batch_size)


def check_setup(checks: Checks, config: TrainConfig, policy: Policy, pool: Pool) -> tuple[Observation, Speed]:
    """Check what a training run was set up with. Raises BadInput for a failure.

    Returns the first observation, and how fast this machine is.
    """
    checks.run("looks", check_looks, policy.info, find_pack(config.simulator.assets))
    checks.run("suite", check_suite, policy.info, config.model, config.task.task_suite)
    first = checks.make("first frame", check_first_frame, first_look, pool, config)
    assert first is not None  # a failure was raised
    pool.start_building(config.task.task_ids)
    check_policy(checks, config, policy, first.observations, config.update.micro_batch_size)
    checks.times.begin("other simulators")
    pool.wait_until_built()  # also because the speed is measured next
    checks.times.begin("speed")
    speed = measure_speed(policy, first, config)
    checks.times.end()
    return first.observations.first, speed


def check_policy(
    checks: Checks,
    config: TrainConfig,
    policy: Policy | None,
    observations: FirstObservations | None,
    micro_batch_size: int | Literal["auto"] | None,
) -> None:
    """Check the policy for faults that raise no error by themselves (`rl.selfcheck`).

    An argument is None if it could not be made; the checks that need it are skipped.
    """
    # Two of the checks work without a simulator, on a made-up observation.
    observation = None if observations is None else observations.first
    any_observation = observation
    if observation is None and policy is not None:
        any_observation = selfcheck.made_up_observation(policy)
    checks.run("attention", selfcheck.attention_probe, policy, any_observation)
    checks.run("images", selfcheck.image_probe, policy, any_observation)
    allow_zero_baseline = config.evaluation.allow_zero_baseline
    checks.run("token head", check_token_head, policy, observation, config.phases, allow_zero_baseline)
    checks.run("log-probs", selfcheck.check_logits_path, policy, any_observation, config.rollout.temperature)
    checks.run("learning", selfcheck.check_learning, policy, any_observation, micro_batch_size)
    # Last, because a prompt of another length makes torch compile code for all lengths from then on.
    checks.run("eyes", check_eyes, policy, observations, config.task)


# The checkpoint and what it is used for.


def check_assets(assets: str) -> Check:
    """Show the name and folder of the assets."""
    pack = find_pack(assets)
    return Check("ok", f"{pack}: {pack.folder}")


def check_checkpoint(info: CheckpointInfo) -> Check:
    """Show what the checkpoint is and what it reads."""
    proprio = "proprio" if info.uses_proprio else "no proprio"
    return Check("ok", f"{info.kind}; reads {info.num_images} image(s) and {proprio}; {info.folder}")


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
    key = select_key(info.statistics, task_suite, model.unnorm_key)
    action = info.statistics[key].action
    low = " ".join(f"{value:.2f}" for value in action.q01)
    high = " ".join(f"{value:.2f}" for value in action.q99)
    text = f"{key}: actions from [{low}] to [{high}]"
    base, _ = base_and_adapter(str(model.checkpoint), None)
    for name, repair in ((key, "leave out --unnorm-key"), (Path(base).name, "use another --task-suite")):
        suites = suites_named(name)
        if suites and task_suite not in suites:
            mismatch = f"{name} is of another suite than the tasks ({task_suite}), and will rarely succeed"
            return Check("warning", f"{text}; {mismatch}: {repair}, or use another --checkpoint")
    return Check("ok", text)


def check_weights(policy: Policy) -> Check:
    """Show the number of parameters and where they are."""
    rows = dict(policy.describe())
    return Check("ok", f"{rows['parameters']}; trainable {rows['trainable']}; on {policy.device}")


def check_teacher(teacher: Teacher) -> Check:
    """Show how the teacher decides, and why."""
    return Check("ok", f"{teacher.mode}: {teacher.why}")


def check_micro_batch(micro_batch_size: int) -> Check:
    """Show how many decisions are in one forward and backward pass."""
    return Check("ok", f"{micro_batch_size} decisions at a time")


# The simulator.


def check_tasks(tasks: Sequence[TaskInfo]) -> Check:
    """Show the tasks and their instructions."""
    return Check("ok", "; ".join(f"{task.task_id} {task.instruction}" for task in tasks))


def first_look_apart(spec: EnvSpec, config: TrainConfig) -> FirstLook:
    """The first look, made in another process, so that a hang or crash of the simulator is a failed check."""
    on_ray = config.simulator.simulators == "ray"
    pool = make_pool(spec, 1, simulators="ray") if on_ray else Pool(spec, 1)
    with pool:
        return first_look(pool, config)


def check_first_frame(first: FirstLook) -> Check:
    """Check that no camera's image is empty."""
    images = first.observations.first.images
    contrast = min(float(image.std()) for image in images)
    text = f"{len(images)} camera(s), {images.shape[2]} x {images.shape[1]} pixels, contrast {contrast:.1f}"
    if contrast < MIN_CONTRAST:
        repair = "check the GL driver (try MUJOCO_GL=osmesa), or --assets"
        return Check("FAILED", f"{text}: a rendered frame is empty; {repair}")
    return Check("ok", text)


# The policy.


def check_token_head(
    policy: Policy, observation: Observation, phases: PhaseConfig, allow_zero_baseline: bool
) -> Check:
    """Check that the checkpoint's token head was trained, if the run needs that. Raises BadInput."""
    has_l1_teacher = policy.action_head is not None and phases.teacher != "greedy"
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


def check_speed(
    policy: Policy, teacher: Teacher, settled: TrainConfig, tasks: Sequence[TaskInfo], first: FirstLook
) -> Check:
    """Show how fast this machine is, and how long the run takes on it. `settled`: the config with all its numbers."""
    speed = measure_speed(policy, first, settled)
    new_run = TrainerState(ranks=int(os.environ.get("WORLD_SIZE", "1")))
    cost = estimate_cost(settled, tasks, speed, new_run, is_teacher(policy, teacher.mode))
    return Check("ok", f"{speed}; this run: {cost}")
