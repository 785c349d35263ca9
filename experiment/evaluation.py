"""Evaluations of a run: teacher and student on held-out initial states, what is kept of them, what they may stop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import imageio.v2 as imageio
import numpy as np

from configs.config import TrainConfig
from contracts import BadInput, first_line, write_json
from experiment.checkpoints import TrainerState, mark_best
from experiment.metrics import Successes, count, progress_bar, rates
from experiment.run_folder import Run
from rl.curriculum import evaluation_episodes
from rl.phases import TeacherMode, phase_at
from rl.ranks import ALONE, Ranks, shared_rollout
from rl.rollout import Behaviour, Randomness, Rollout
from rl.trajectory import Episode, Trajectory
from rl.update import Learner

if TYPE_CHECKING:
    from envs.pool import Pool
    from vla.policy import Mode, Policy

log = logging.getLogger(__name__)


def evaluate(
    policy: Policy, pool: Pool, episodes: Sequence[Episode], mode: Mode, temperature: float = 1.0, seed: int = 0, *,
    by_teacher: bool = False, ranks: Ranks = ALONE, **options: Any,
) -> Rollout:  # fmt: skip
    """Play the given episodes by the code of training rollouts, divided among the ranks; mode "l1" is the teacher's.

    `options`: as `rl.rollout.rollout` takes them. The random stream depends on the seed and the episode only, so every
    evaluation of a run draws the same numbers: a difference comes from the policy.
    """
    behaviour = Behaviour(
        epsilon=1.0 if by_teacher or mode == "l1" else 0.0, temperature=temperature,
        teacher_mode="l1" if mode == "l1" else "greedy", student_mode="sample" if mode == "sample" else "greedy",
        keep_observations=False,
    )  # fmt: skip
    stream = Randomness(seed, "evaluation")
    return shared_rollout(ranks, policy, pool, episodes, behaviour=behaviour, randomness=stream, **options)


@dataclass(frozen=True)
class Validation:
    """Teacher and student on the same held-out initial states."""

    teacher: Successes
    student: Successes  # greedy
    student_sampled: Successes | None  # None with --eval-trials 0
    played: dict[
        str, list[Trajectory]
    ]  # "teacher" (only when it was played now), "student", "student_sampled"

    def metrics(self) -> dict[str, float]:
        found = {"eval/gap": self.teacher.rate - self.student.rate}
        for actor in ("teacher", "student", "student_sampled"):
            name, successes = f"eval/{actor}_success", getattr(self, actor)
            if successes is not None:
                found |= successes.metrics(name) | rates(name, self.played.get(actor, ()))
        return found

    def __str__(self) -> str:
        rates = f"teacher {self.teacher}, student {self.student}"
        return rates if self.student_sampled is None else f"{rates}, student sampled {self.student_sampled}"


def validate(
    policy: Policy, pool: Pool, config: TrainConfig, teacher_mode: TeacherMode, known_teacher: Successes | None,
    ranks: Ranks = ALONE,
) -> Validation:  # fmt: skip
    """Evaluate student and teacher, which never changes: it plays only where no result of it is known.

    Nor does a student that is its teacher still.
    """
    task, played = config.task, {}

    def play(actor: str, mode: Mode, trials: int = 1) -> Successes:
        episodes = evaluation_episodes(task.task_ids, task.eval_init_states, trials)
        with progress_bar(f"evaluating: {actor}", None, shown=ranks.is_main) as on_steps:
            played[actor] = evaluate(
                policy, pool, episodes, mode, config.rollout.temperature, config.run.seed,
                by_teacher=actor == "teacher", max_batch=config.model.max_batch, ranks=ranks,
                record=lambda episode: mode != "sample" and episode.index == 0, on_steps=on_steps,
            ).trajectories  # fmt: skip
        return count(played[actor])

    teacher, trials = known_teacher or play("teacher", teacher_mode), config.evaluation.eval_trials
    if teacher_mode == "greedy" and "teacher" in played and policy.is_teacher():
        student, played["student"] = teacher, played["teacher"]
    else:
        student = play("student", "greedy")
    return Validation(teacher, student, play("student_sampled", "sample", trials) if trials else None, played)


def evaluation_is_due(config: TrainConfig, state: TrainerState) -> bool:
    """At step 0 and whenever env steps pass a multiple of eval_interval."""
    interval = config.evaluation.eval_interval
    return state.evaluated_at is None or state.global_step // interval > state.evaluated_at // interval


def evaluate_and_record(
    config: TrainConfig, run: Run, learner: Learner, pool: Pool, state: TrainerState
) -> None:
    """Validate teacher and student, record, keep the best checkpoint, write videos. Raises what the checks raise."""
    teacher = None if state.teacher_k is None else Successes(state.teacher_k, state.teacher_n or 0)
    with run.timed("eval"):
        found = validate(learner.policy, pool, config, learner.teacher_mode, teacher, learner.ranks)
    run.record(state.global_step, state.update, found.metrics())
    log.info("step %d  evaluation: %s", state.global_step, found)
    if learner.ranks.is_main:
        write_evaluation(run, state.global_step, found)
    if state.evaluated_at is None:
        check_baseline(config, found)
    state.evaluated_at, state.teacher_k, state.teacher_n = state.global_step, found.teacher.k, found.teacher.n
    if config.evaluation.best_by == "evaluation" and state.improves(found.student.interval[0]):
        mark_best(run.checkpoints, learner, state, found.metrics())


def check_baseline(config: TrainConfig, found: Validation) -> None:
    """Stop a run whose first teacher or actor never succeeds: it cannot teach. Warn of one that always does."""
    first, acting = phase_at(0, config.phases), found.student_sampled or found.student
    teacher_first = first.distils or first.epsilon > 0
    actor, baseline = ("teacher", found.teacher) if teacher_first else ("student", acting)
    if baseline.k == 0 and not config.evaluation.allow_zero_baseline:
        raise BadInput(
            f"the {actor} succeeded in 0 of {baseline.n} baseline episodes: a policy that never succeeds has nothing "
            "to learn from. Check that --checkpoint, --task-suite, --unnorm-key and --assets belong together, or go on "
            "with --allow-zero-baseline"
        )
    if acting.rate >= 0.95:
        advice = "there is little room for improvement; choose other --task-ids, or a higher --temperature"
        log.warning("the student begins with %s: %s", acting, advice)


def write_evaluation(run: Run, global_step: int, found: Validation) -> None:
    """Write every episode's outcome and the filmed episodes. What fails here costs the files, never the run."""
    starts = len(
        {t.episode.group for t in found.played["student"]}
    )  # (task, initial state); trials repeat all of them

    def outcome(t: Trajectory) -> dict[str, Any]:
        key = {"task_id": t.episode.task_id, "init_state_id": t.episode.init_state_id}
        return key | {"trial": t.episode.index // starts, "success": t.success, "env_steps": t.env_steps}

    outcomes = {actor: [outcome(t) for t in played] for actor, played in found.played.items()}
    try:
        (run.folder / "evaluations").mkdir(exist_ok=True)
        write_json(run.folder / "evaluations" / f"step_{global_step}.json", outcomes)
        for actor, (first, *_) in found.played.items():
            if first.frames:
                path = run.folder / "videos" / f"{actor}-step_{global_step}.mp4"
                write_video(path, first.frames)
                ending = "success" if first.success else "failure"
                run.wandb.video(f"video/{actor}", path, global_step, f"{first.episode.describe()}: {ending}")
    except Exception as error:
        log.warning(
            "step %d: files of the evaluation could not be written (%s)", global_step, first_line(error)
        )


def write_video(path: Path, frames: Sequence[np.ndarray]) -> None:
    """Write frames (H, W, 3) uint8, one per env step, as H.264, at LIBERO's control rate: it plays in real time."""
    path.parent.mkdir(exist_ok=True)
    imageio.mimwrite(path, frames, fps=20, macro_block_size=16, ffmpeg_log_level="error")  # type: ignore[arg-type,call-overload]
