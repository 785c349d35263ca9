"""When a run is evaluated, what is written then, and which evaluations stop a run that cannot learn."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from configs.config import TrainConfig
from configs.sections import PhaseConfig
from contracts import BadInput, first_line, write_json
from experiment.checkpoints import TrainerState, mark_best, save_state
from experiment.report import update_report
from experiment.run_files import Outcome, outcomes_path
from experiment.run_folder import Run
from experiment.statistics import Successes
from experiment.validation import Validation, validate
from experiment.verdict import NEARLY_ALL
from experiment.videos import write_video
from rl.phases import end_of_warmup, phase_at
from rl.trajectory import Trajectory
from rl.update import Learner

if TYPE_CHECKING:
    from envs.pool import Pool

log = logging.getLogger(__name__)


def evaluation_steps(config: TrainConfig) -> list[int]:
    """The env steps from which an evaluation is due: 0, the warmup's end, multiples of --eval-interval, and the end."""
    total_steps = config.phases.total_steps
    # A rollout has at least n_steps env steps, so a shorter interval is reached after every rollout, too.
    interval = max(config.evaluation.eval_interval, config.rollout.n_steps)
    multiples = range(0, total_steps, interval)
    warmup_end = min(end_of_warmup(config.phases), total_steps)
    return sorted({*multiples, warmup_end, total_steps})


def evaluation_is_due(config: TrainConfig, state: TrainerState) -> bool:
    """Whether env steps have passed one of `evaluation_steps` since the last evaluation."""
    evaluated_at = state.evaluated_at
    if evaluated_at is None:
        return True
    return any(evaluated_at < step <= state.global_step for step in evaluation_steps(config))


def warmup_has_ended(config: TrainConfig, state: TrainerState) -> bool:
    """Whether the warmup ended after the last evaluation, and the run goes on."""
    warmup_end = end_of_warmup(config.phases)
    is_over = warmup_end <= state.global_step < config.phases.total_steps
    return is_over and state.evaluated_at is not None and state.evaluated_at < warmup_end


def evaluate_and_record(
    config: TrainConfig, run: Run, learner: Learner, pool: Pool, state: TrainerState
) -> None:
    """Evaluate the newest checkpoint, record the result, check it, and mark the checkpoint if it is the best.

    Raises BadInput when the first evaluation, or the one after the warmup, shows that the run cannot learn.
    """
    known_teacher = None if state.teacher_k is None else Successes(state.teacher_k, state.teacher_n or 0)
    started = time.perf_counter()
    with run.timed("eval"):
        validation = validate(learner, pool, config, known_teacher)
    run.episode_s = (time.perf_counter() - started) / validation.num_played
    record_validation(run, state, validation)
    check_validation(config, state, validation)
    keep_validation(config, run, learner, state, validation)


def record_validation(run: Run, state: TrainerState, validation: Validation) -> None:
    """Log the result, add it to the metrics, and write the evaluation's files and the report."""
    run.log_metrics(state.global_step, state.update, validation.metrics())
    log.info("evaluation after %s env steps: %s", f"{state.global_step:,}", validation)
    if run.ranks.is_main:
        write_evaluation(run, state.global_step, validation)
        update_report(run.folder)


def check_validation(config: TrainConfig, state: TrainerState, validation: Validation) -> None:
    """Check the first evaluation, and the one after the warmup. Raises BadInput if the run cannot learn."""
    if state.evaluated_at is None:
        check_baseline(config, validation)
    if warmup_has_ended(config, state):
        check_imitation(config.phases, validation)


def keep_validation(
    config: TrainConfig, run: Run, learner: Learner, state: TrainerState, validation: Validation
) -> None:
    """Mark the newest checkpoint if it is the best, and let it remember the evaluation.

    A resumed run then neither repeats the evaluation nor cuts its record.
    """
    state.evaluated_at = state.global_step
    state.teacher_k = validation.teacher.k
    state.teacher_n = validation.teacher.n
    if config.evaluation.best_by == "evaluation" and state.take_best(validation.student.rate):
        mark_best(run.checkpoints, learner, state, validation.metrics())
    state.metrics_bytes = run.metrics_bytes()
    if learner.ranks.is_main:
        save_state(run.checkpoints / f"step_{state.global_step}", learner, state)


def check_baseline(config: TrainConfig, validation: Validation) -> None:
    """Check the first evaluation: raise BadInput if the policy that training starts from had no success.

    That is the teacher, or without a warmup and transition the student. Logs a warning if the student nearly always
    succeeds already.
    """
    first_phase = phase_at(0, config.phases)
    student = validation.student if validation.student_sampled is None else validation.student_sampled
    if first_phase.distils or first_phase.epsilon > 0:
        actor = "teacher"
        baseline = validation.teacher
    else:
        actor = "student"
        baseline = student
    if baseline.k == 0 and not config.evaluation.allow_zero_baseline:
        raise BadInput(
            f"the {actor} succeeded in 0 of {baseline.n} baseline episodes: a policy that never succeeds has nothing "
            "to learn from. Check that --checkpoint, --task-suite, --unnorm-key and --assets belong together, or go on "
            "with --allow-zero-baseline"
        )
    if student.rate >= NEARLY_ALL:
        advice = "there is little room for improvement; choose other --task-ids, or a higher --temperature"
        log.warning("the student starts with a success of %s: %s", student, advice)


def check_imitation(phases: PhaseConfig, validation: Validation) -> None:
    """Check the evaluation after the warmup: raise BadInput if the student has not learned to do as the teacher does.

    The student fails only if its success rate is below the required one with a confidence of 95 %.
    """
    required = phases.warmup_agreement * validation.teacher.rate
    _, upper_bound = validation.student.interval
    if upper_bound < required:
        raise BadInput(
            f"after the warmup the greedy student succeeds in {validation.student}, and the teacher in "
            f"{validation.teacher}: the student did not learn to imitate the teacher. Start again with more "
            "--warmup-steps or --warmup-epochs or another --warmup-lr, or go on from here with --resume RUN "
            "--warmup-agreement 0"
        )


def write_evaluation(run: Run, global_step: int, validation: Validation) -> None:
    """Write the outcome of every episode, and the videos. A failure is logged and does not stop the run."""
    try:
        _write_outcomes(run, global_step, validation)
        _write_videos(run, global_step, validation)
    except Exception as error:
        log.warning(
            "step %d: files of the evaluation could not be written (%s)", global_step, first_line(error)
        )


def _write_outcomes(run: Run, global_step: int, validation: Validation) -> None:
    # Every (task, initial state) is one group. Episode indices go through all groups once per trial.
    num_starts = len({trajectory.episode.group for trajectory in validation.trajectories["student"]})
    outcomes: dict[str, list[dict[str, object]]] = {}
    for actor, trajectories in validation.trajectories.items():
        outcomes[actor] = [asdict(_outcome_of(trajectory, num_starts)) for trajectory in trajectories]
    path = outcomes_path(run.folder, global_step)
    path.parent.mkdir(exist_ok=True)
    write_json(path, outcomes)


def _outcome_of(trajectory: Trajectory, num_starts: int) -> Outcome:
    episode = trajectory.episode
    assert episode.init_state_id is not None, "evaluations play the benchmark's initial states"
    trial = episode.index // num_starts
    return Outcome(episode.task_id, episode.init_state_id, trial, trajectory.success, trajectory.env_steps)


def _write_videos(run: Run, global_step: int, validation: Validation) -> None:
    for actor, trajectories in validation.trajectories.items():
        first = trajectories[0]
        if first.frames:
            path = run.folder / "videos" / f"{actor}-step_{global_step}.mp4"
            write_video(path, first.frames)
            ending = "success" if first.success else "failure"
            run.wandb.video(f"video/{actor}", path, global_step, f"{first.episode.describe()}: {ending}")
