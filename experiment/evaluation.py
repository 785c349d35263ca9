"""Evaluate teacher and student on held-out initial states, write the outcomes, and stop a run that cannot learn."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from configs.config import PhaseConfig, TrainConfig
from contracts import BadInput, first_line, write_json
from experiment.checkpoints import TrainerState, mark_best, save_state
from experiment.metrics import success_rates
from experiment.report import update_report
from experiment.reported import compare_with_reports
from experiment.run_files import Actor, Outcome, outcomes_path
from experiment.run_folder import Run
from experiment.statistics import Successes, count_successes
from experiment.terminal import show_progress
from experiment.verdict import NEARLY_ALL
from experiment.videos import write_video
from rl.behaviour import Behaviour
from rl.curriculum import evaluation_episodes
from rl.phases import end_of_warmup, phase_at
from rl.randomness import Randomness
from rl.ranks import ALONE, Ranks
from rl.rollout import Rollout, play_episodes
from rl.trajectory import Episode, Trajectory
from rl.update import Learner

if TYPE_CHECKING:
    from envs.pool import Pool
    from vla.policy import Mode, Policy

log = logging.getLogger(__name__)


def play_evaluation(
    policy: Policy,
    pool: Pool,
    episodes: Sequence[Episode],
    mode: Mode,
    temperature: float = 1.0,
    seed: int = 0,
    *,
    by_teacher: bool = False,
    ranks: Ranks = ALONE,
    max_batch: int | None = None,
    film: Callable[[Episode], bool] = lambda episode: False,
    on_finished: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Rollout:
    """Play the given episodes for an evaluation, with the code of training rollouts, divided among the ranks.

    With mode "l1" the teacher acts, whatever `by_teacher` is. `max_batch`, `film` and `on_finished` are those of
    `rl.rollout.play_episodes`. The random stream depends only on the seed and the episode: every evaluation of a run
    draws the same numbers, so a difference between two evaluations comes from the policy.
    """
    teacher_acts = by_teacher or mode == "l1"
    behaviour = Behaviour(
        epsilon=1.0 if teacher_acts else 0.0,
        temperature=temperature,
        teacher_mode="l1" if mode == "l1" else "greedy",
        student_mode="sample" if mode == "sample" else "greedy",
        keep_observations=False,
    )
    return play_episodes(
        policy,
        pool,
        episodes,
        behaviour=behaviour,
        randomness=Randomness(seed, "evaluation"),
        max_batch=max_batch,
        ranks=ranks,
        film=film,
        on_finished=on_finished,
    )


@dataclass(frozen=True)
class Validation:
    """The successes of teacher and student on the same held-out initial states."""

    teacher: Successes
    student: Successes  # greedy
    student_sampled: Successes | None  # None with --eval-trials 0
    trajectories: dict[str, list[Trajectory]]  # by actor; "teacher" only if it was played in this validation

    @property
    def num_played(self) -> int:
        """Episodes that were played. One that was played for teacher and student counts once."""
        return len({id(trajectory) for played in self.trajectories.values() for trajectory in played})

    def metrics(self) -> dict[str, float]:
        """Success rates, counts, intervals and rates by task, under their names in metrics.jsonl."""
        metrics = {"eval/gap": self.teacher.rate - self.student.rate}
        by_actor = {"teacher": self.teacher, "student": self.student, "student_sampled": self.student_sampled}
        for actor, successes in by_actor.items():
            if successes is not None:
                name = f"eval/{actor}_success"
                metrics |= successes.metrics(name)
                metrics |= success_rates(name, self.trajectories.get(actor, ()))
        return metrics

    def __str__(self) -> str:
        text = f"teacher {self.teacher}, student {self.student}"
        return text if self.student_sampled is None else f"{text}, student sampled {self.student_sampled}"


def validate(
    learner: Learner, pool: Pool, config: TrainConfig, known_teacher: Successes | None
) -> Validation:
    """Evaluate teacher and student on the held-out initial states.

    The teacher never changes, so it is played only if `known_teacher`, its result, is None. If the student still equals
    its greedy teacher, the student is played for both: its passes are compiled already.
    """
    trajectories: dict[str, list[Trajectory]] = {}
    is_played_for_both = known_teacher is None and student_equals_teacher(learner)
    if known_teacher is None and not is_played_for_both:
        trajectories["teacher"] = _play("teacher", learner, pool, config)
    trajectories["student"] = _play("student", learner, pool, config)
    if is_played_for_both:
        trajectories["teacher"] = trajectories["student"]
    if config.evaluation.eval_trials > 0:
        trajectories["student_sampled"] = _play("student_sampled", learner, pool, config)
    successes = {
        actor: count_successes(trajectory.success for trajectory in played)
        for actor, played in trajectories.items()
    }
    return Validation(
        teacher=successes["teacher"] if known_teacher is None else known_teacher,
        student=successes["student"],
        student_sampled=successes.get("student_sampled"),
        trajectories=trajectories,
    )


def student_equals_teacher(learner: Learner) -> bool:
    """Whether the greedy student still decides as its teacher does."""
    return learner.teacher_mode == "greedy" and learner.policy.equals_teacher()


def _play(actor: Actor, learner: Learner, pool: Pool, config: TrainConfig) -> list[Trajectory]:
    """Play all held-out initial states, --eval-trials times if the student is sampled, else once.

    The first episode of a deterministic actor is filmed.
    """
    modes: dict[Actor, Mode] = {
        "teacher": learner.teacher_mode,
        "student": "greedy",
        "student_sampled": "sample",
    }
    is_sampled = actor == "student_sampled"
    ranks = learner.ranks
    trials = config.evaluation.eval_trials if is_sampled else 1
    episodes = evaluation_episodes(config.task.task_ids, config.task.eval_init_states, trials)
    name = f"evaluation of the {actor.replace('_', ', ')}"
    num_of_rank = len(episodes[ranks.rank :: ranks.size])
    with show_progress(name, num_of_rank, "episodes", ranks.is_main) as activity:
        rollout = play_evaluation(
            learner.policy,
            pool,
            episodes,
            modes[actor],
            config.rollout.temperature,
            config.run.seed,
            by_teacher=actor == "teacher",
            ranks=ranks,
            max_batch=config.model.max_batch,
            film=lambda episode: not is_sampled and episode.index == 0,
            on_finished=lambda trajectory: activity.count_episode(trajectory.success),
        )
    return rollout.trajectories


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
    check_validation(config, learner, state, validation)
    keep_validation(config, run, learner, state, validation)


def record_validation(run: Run, state: TrainerState, validation: Validation) -> None:
    """Log the result, add it to the metrics, and write the evaluation's files and the report."""
    run.log_metrics(state.global_step, state.update, validation.metrics())
    log.info("evaluation after %s env steps: %s", f"{state.global_step:,}", validation)
    if run.ranks.is_main:
        write_evaluation(run, state.global_step, validation)
        update_report(run.folder)


def check_validation(
    config: TrainConfig, learner: Learner, state: TrainerState, validation: Validation
) -> None:
    """Check the first evaluation, and the one after the warmup. Raises BadInput if the run cannot learn."""
    if state.evaluated_at is None:
        compare_start(config, learner, validation)
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
    lower_bound, _ = validation.student.interval
    if config.evaluation.best_by == "evaluation" and state.take_best(lower_bound):
        mark_best(run.checkpoints, learner, state, validation.metrics())
    state.metrics_bytes = run.metrics_bytes()
    if learner.ranks.is_main:
        save_state(run.checkpoints / f"step_{state.global_step}", learner, state)


def compare_start(config: TrainConfig, learner: Learner, validation: Validation) -> None:
    """Log how the checkpoint's success compares with what others report for it, if they do and it was played so.

    The teacher of the first evaluation is the checkpoint as it was downloaded, unless --teacher names another policy.
    """
    task = config.task
    simulator = config.simulator
    is_changed = simulator.bddl_file is not None or simulator.max_env_steps is not None
    if is_changed or config.phases.teacher_checkpoint is not None:
        return
    comparison = compare_with_reports(
        str(config.model.checkpoint),
        task.task_suite,
        task.task_ids,
        learner.teacher_mode,
        validation.teacher,
        assets=simulator.assets,
    )
    if comparison is not None:
        log.log(logging.WARNING if comparison.is_below else logging.INFO, "%s", comparison.sentence)


def check_baseline(config: TrainConfig, validation: Validation) -> None:
    """Check the first evaluation: raise BadInput if the policy that acts first had no success.

    Logs a warning if the student nearly always succeeds already.
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
