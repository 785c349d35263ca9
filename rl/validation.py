"""The evaluations of a run: when they are due, what is recorded, and what they may stop."""

from __future__ import annotations

import logging

import torch

from configs.config import TrainConfig
from errors import BadInput
from rl.checkpoints import TrainerState, mark_best, restore_best
from rl.contracts import Pool, TeacherMode
from rl.evaluation import Successes, Validation, validate
from rl.evaluation_files import write_evaluation
from rl.learner import Learner
from rl.phases import phase_at
from rl.run import Run
from rl.selfcheck import check_teacher

log = logging.getLogger("train")
LITTLE_ROOM = 0.95  # success in the first evaluation above which a run is warned of


def evaluation_is_due(config: TrainConfig, state: TrainerState) -> bool:
    """At step 0 and whenever env steps pass a multiple of eval_interval."""
    interval = config.evaluation.eval_interval
    return state.evaluated_at is None or state.global_step // interval > state.evaluated_at // interval


def evaluate_and_record(
    config: TrainConfig, run: Run, learner: Learner, pool: Pool, state: TrainerState, teacher_mode: TeacherMode
) -> Validation:
    """Validate teacher and student, record, keep the best checkpoint, write videos.

    Raises BadInput when the first evaluation shows that there is nothing to learn from, SelfCheckError when the teacher
    has moved.
    """
    exact = learner.policy.dtype is torch.float32
    check_teacher(run.teacher_file, learner.policy, teacher_mode, tolerated=0.0 if exact else 0.1)
    teacher = None
    if state.teacher_k is not None and state.teacher_n is not None:
        teacher = Successes(state.teacher_k, state.teacher_n)
    with run.timed("eval"):
        validation = validate(learner.policy, pool, config, teacher_mode, teacher, learner.ranks)
    run.record(state.global_step, state.update, validation.metrics())
    log.info("step %d  evaluation: %s", state.global_step, validation)
    if learner.ranks.is_main:
        write_evaluation(run, state.global_step, validation, learner.policy)

    if state.evaluated_at is None:
        check_baseline(config, validation)
        state.baseline_rate = validation.student.rate
    state.evaluated_at, state.teacher_k, state.teacher_n = state.global_step, validation.teacher.k, validation.teacher.n
    if config.evaluation.best_by == "evaluation" and state.improves(validation.student.interval[0]):
        mark_best(run.checkpoints, learner, state, validation.metrics())
    return validation


def check_baseline(config: TrainConfig, validation: Validation) -> None:
    """Stop before the first update when the policy that acts first never succeeds: sparse rewards cannot teach it.

    Warn when the student nearly always succeeds: there is nothing left to learn.
    """
    if phase_at(0, config.phases).epsilon > 0:
        actor, baseline = "teacher", validation.teacher
    else:
        actor, baseline = "sampled student", validation.student_sampled
    if baseline.k == 0 and not config.evaluation.allow_zero_baseline:
        raise BadInput(
            f"the {actor} succeeded in 0 of {baseline.n} baseline episodes: a policy that never succeeds has nothing "
            "to learn from. Check that --checkpoint, --task-suite, --unnorm-key and --assets belong together, or go on "
            "with --allow-zero-baseline"
        )
    if validation.student_sampled.rate >= LITTLE_ROOM:
        log.warning(
            "the sampled student begins with %s: there is little room for improvement; choose other --task-ids, or a "
            "higher --temperature",
            validation.student_sampled,
        )


def fell_below_baseline(
    config: TrainConfig, run: Run, learner: Learner, state: TrainerState, validation: Validation
) -> bool:
    """With --stop-if-below-baseline: whether the student got worse than it began; then the best checkpoint is restored.

    Worse by more than chance: the 95 % interval of its success ends below the rate of the first evaluation.
    """
    _, high = validation.student.interval
    baseline = state.baseline_rate
    if not config.evaluation.stop_if_below_baseline or baseline is None or high >= baseline:
        return False
    best = restore_best(run.checkpoints, learner)
    log.info(
        "step %d: the student succeeds in %s, below the first evaluation's %.0f %%; stopped and restored %s",
        state.global_step, validation.student, 100 * baseline, best.name,
    )  # fmt: skip
    return True
