"""Evaluations of a run: teacher and student on held-out initial states, what is kept of them, what they may stop."""

from __future__ import annotations

import logging
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import imageio.v2 as imageio
import numpy as np
import torch

from configs.config import TrainConfig
from contracts import BadInput, Observation, SelfCheckError, first_line, write_json
from rl.checkpoints import TrainerState, mark_best
from rl.curriculum import evaluation_episodes
from rl.metrics import progress_bar
from rl.phases import TeacherMode, phase_at
from rl.ranks import ALONE, Ranks, shared_rollout
from rl.results import Successes, count
from rl.rollout import ALL_READY, Batching, Behaviour, Randomness, Rollout, batching_of
from rl.run import Run
from rl.trajectory import Episode, Trajectory
from rl.update import Learner

if TYPE_CHECKING:
    from envs.pool import Pool
    from vla.policy import Mode, Policy

log = logging.getLogger("train")

FRAMES_PER_SECOND = 20  # LIBERO's control rate: videos play in real time
LITTLE_ROOM = 0.95  # success in the first evaluation above which a run is warned of


def evaluate(
    policy: Policy, pool: Pool, episodes: Sequence[Episode], mode: Mode, temperature: float = 1.0, seed: int = 0, *,
    by_teacher: bool = False, batching: Batching = ALL_READY, ranks: Ranks = ALONE, **watching: Any,
) -> Rollout:  # fmt: skip
    """Play the given episodes by the code that training rollouts use, divided among the ranks.

    mode: "greedy" or "sample", or "l1", which is the teacher's alone. watching: as `rl.rollout.rollout` takes it. The
    random stream depends on the seed and the episode only, so every evaluation of a run draws the same numbers: a
    difference between two of them comes from the policy.
    """
    behaviour = Behaviour(
        epsilon=1.0 if by_teacher or mode == "l1" else 0.0,
        temperature=temperature,
        teacher_mode="l1" if mode == "l1" else "greedy",
        student_mode="sample" if mode == "sample" else "greedy",
        keep_observations=False,
    )
    randomness = Randomness(seed, "evaluation")
    return shared_rollout(
        ranks, policy, pool, episodes, behaviour=behaviour, randomness=randomness, batching=batching, **watching
    )


@dataclass(frozen=True)
class Validation:
    """Teacher and student on the same held-out initial states."""

    teacher: Successes
    student: Successes  # greedy
    student_sampled: Successes
    played: dict[str, list[Trajectory]]  # "teacher" (only when it was played now), "student", "student_sampled"
    per_task: dict[str, Successes] = field(default_factory=dict)  # of several tasks: by metric name

    def __str__(self) -> str:
        return f"teacher {self.teacher}, student {self.student}, student sampled {self.student_sampled}"

    def metrics(self) -> dict[str, float]:
        return {
            **self.teacher.metrics("eval/teacher_success"),
            **self.student.metrics("eval/student_success"),
            **self.student_sampled.metrics("eval/student_sampled_success"),
            "eval/gap": self.teacher.rate - self.student.rate,
            **{name: successes.rate for name, successes in self.per_task.items()},
        }


def validate(
    policy: Policy, pool: Pool, config: TrainConfig, teacher_mode: TeacherMode, known_teacher: Successes | None,
    ranks: Ranks = ALONE,
) -> Validation:  # fmt: skip
    """Evaluate student and teacher; the teacher never changes, so its result is taken from `known_teacher` if given.

    Only sampled decisions are worth repeating: from the same initial state a deterministic policy does the same again.
    The first episode of teacher and greedy student is filmed.
    """
    task, played = config.task, {}

    def play(actor: str, title: str, mode: Mode, trials: int = 1) -> None:
        episodes = evaluation_episodes(task.task_ids, task.eval_init_states, trials)
        with progress_bar(f"evaluating the {title}", None, shown=ranks.is_main) as on_steps:
            played[actor] = evaluate(
                policy, pool, episodes, mode, config.rollout.temperature, config.run.seed,
                by_teacher=actor == "teacher", batching=batching_of(config), ranks=ranks,
                record=lambda episode: mode != "sample" and episode.index == 0, on_steps=on_steps,
            ).trajectories  # fmt: skip

    if known_teacher is None:
        play("teacher", "teacher", teacher_mode)
        known_teacher = count(played["teacher"])
    play("student", "student", "greedy")
    play("student_sampled", "student, sampled", "sample", config.evaluation.eval_trials)
    per_task = {
        f"eval/{actor}_success_task_{task_id}": count([t for t in played[actor] if t.episode.task_id == task_id])
        for actor in ("student", "student_sampled")
        for task_id in task.task_ids
        if len(task.task_ids) > 1
    }
    return Validation(known_teacher, count(played["student"]), count(played["student_sampled"]), played, per_task)


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
    policy = learner.policy
    check_teacher(run.teacher_file, policy, teacher_mode, tolerated=0.0 if policy.dtype is torch.float32 else 0.1)
    teacher = None
    if state.teacher_k is not None and state.teacher_n is not None:
        teacher = Successes(state.teacher_k, state.teacher_n)
    with run.timed("eval"):
        found = validate(policy, pool, config, teacher_mode, teacher, learner.ranks)
    run.record(state.global_step, state.update, found.metrics())
    log.info("step %d  evaluation: %s", state.global_step, found)
    if learner.ranks.is_main:
        write_evaluation(run, state.global_step, found)
    if state.evaluated_at is None:
        check_baseline(config, found)
    state.evaluated_at, state.teacher_k, state.teacher_n = state.global_step, found.teacher.k, found.teacher.n
    if config.evaluation.best_by == "evaluation" and state.improves(found.student.interval[0]):
        mark_best(run.checkpoints, learner, state, found.metrics())
    return found


def check_baseline(config: TrainConfig, found: Validation) -> None:
    """Stop before the first update when the policy that acts first never succeeds: sparse rewards cannot teach it.

    Warn when the student nearly always succeeds: there is nothing left to learn.
    """
    teacher_first = phase_at(0, config.phases).epsilon > 0
    actor, baseline = ("teacher", found.teacher) if teacher_first else ("sampled student", found.student_sampled)
    if baseline.k == 0 and not config.evaluation.allow_zero_baseline:
        raise BadInput(
            f"the {actor} succeeded in 0 of {baseline.n} baseline episodes: a policy that never succeeds has nothing "
            "to learn from. Check that --checkpoint, --task-suite, --unnorm-key and --assets belong together, or go on "
            "with --allow-zero-baseline"
        )
    if found.student_sampled.rate >= LITTLE_ROOM:
        advice = "there is little room for improvement; choose other --task-ids, or a higher --temperature"
        log.warning("the sampled student begins with %s: %s", found.student_sampled, advice)


# what is kept


def write_evaluation(run: Run, global_step: int, found: Validation) -> None:
    """Write every episode's outcome and the filmed episodes. What fails here costs the files, never the run.

    Their names have the env step: a resumed run that evaluates again at the same step replaces them.
    """
    try:
        (run.folder / "evaluations").mkdir(exist_ok=True)
        outcomes = {actor: outcomes_of(played) for actor, played in found.played.items()}
        write_json(run.folder / "evaluations" / f"step_{global_step}.json", outcomes)
        for actor, (first, *_) in found.played.items():
            if first.frames:
                path = run.folder / "videos" / f"{actor}-step_{global_step}.mp4"
                write_video(path, first.frames)
                ending = "success" if first.success else "failure"
                caption = f"{first.episode.describe()}: {ending} after {first.env_steps} env steps"
                run.wandb.video(f"video/{actor}", path, global_step, caption)
    except Exception as error:
        log.warning("step %d: files of the evaluation could not be written (%s)", global_step, first_line(error))


def outcomes_of(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """One record per episode; `trial` counts the episodes of one (task, initial state)."""
    played: Counter[tuple[int, int]] = Counter()
    records = []
    for t in trajectories:
        start = (t.episode.task_id, t.episode.init_state_id)
        outcome = {"success": t.success, "env_steps": t.env_steps}
        records.append({"task_id": start[0], "init_state_id": start[1], "trial": played[start], **outcome})
        played[start] += 1
    return records


def write_video(path: Path, frames: Sequence[np.ndarray]) -> None:
    """Write frames (H, W, 3) uint8, one per env step, as H.264."""
    path.parent.mkdir(exist_ok=True)
    with imageio.get_writer(path, fps=FRAMES_PER_SECOND, macro_block_size=16, ffmpeg_log_level="error") as writer:
        for frame in frames:
            writer.append_data(frame)  # type: ignore[attr-defined]  # imageio's type here is what readers share


# the teacher never changes


def remember_teacher(
    path: Path, policy: Policy, observation: Observation, teacher_mode: TeacherMode, write: bool = True
) -> None:
    """Store an observation and the teacher's chunk for it, for `check_teacher`."""
    with policy.teacher():
        tokens = policy.act([observation], mode=teacher_mode).tokens[0]
    if write:
        np.savez_compressed(path, tokens=tokens.numpy(), **vars(observation))


def check_teacher(path: Path, policy: Policy, teacher_mode: TeacherMode, tolerated: float = 0.0) -> None:
    """The teacher never changes: it still answers the stored observation with the stored chunk.

    `tolerated`: share of tokens that may differ. In bfloat16 a run that goes on with another GPU rounds near-ties
    differently; in float32 nothing is excused. Raises SelfCheckError.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            observation = Observation(
                stored["images"], stored["proprio"], str(stored["instruction"]), bool(stored["prepared"])
            )
            expected = stored["tokens"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path}: cannot be read ({first_line(error)}); restore it from a copy of the run") from None
    with policy.teacher():
        tokens = policy.act([observation], mode=teacher_mode).tokens[0].numpy()
    changed = int((tokens != expected).sum())
    if changed > tolerated * len(expected):
        raise SelfCheckError(
            f"the teacher has moved: {changed} of {len(expected)} tokens of its chunk for the stored observation "
            f"({path}) are no longer what they were at the start; frozen weights were trained or replaced"
        )
