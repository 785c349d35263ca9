"""How evaluations are played, and the evaluation of teacher and student on a run's held-out initial states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.config import TrainConfig
from experiment.metrics import success_rates
from experiment.run_files import Actor
from experiment.statistics import Successes, count_successes
from experiment.terminal import show_progress
from rl.behaviour import Behaviour
from rl.curriculum import evaluation_episodes
from rl.randomness import Randomness
from rl.rollout import play_episodes
from rl.trajectory import Trajectory
from rl.update import Learner

if TYPE_CHECKING:
    from envs.pool import Pool
    from vla.policy import Mode


def evaluation_behaviour(mode: Mode, temperature: float = 1.0, by_teacher: bool = False) -> Behaviour:
    """How a policy decides in an evaluation. With mode "l1" the teacher acts, whatever `by_teacher` is."""
    teacher_acts = by_teacher or mode == "l1"
    return Behaviour(
        epsilon=1.0 if teacher_acts else 0.0,
        temperature=temperature,
        teacher_mode="greedy" if mode == "sample" else mode,
        student_mode="greedy" if mode == "l1" else mode,
        keep_observations=False,
    )


def evaluation_randomness(seed: int) -> Randomness:
    """The random stream of evaluations, which depends only on the seed and the episode.

    Every evaluation of a run draws the same numbers, so a difference between two evaluations comes from the policy.
    """
    return Randomness(seed, "evaluation")


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
        rollout = play_episodes(
            learner.policy,
            pool,
            episodes,
            evaluation_behaviour(modes[actor], config.rollout.temperature, by_teacher=actor == "teacher"),
            evaluation_randomness(config.run.seed),
            ranks=ranks,
            max_batch=config.model.max_batch,
            film=lambda episode: not is_sampled and episode.index == 0,
            on_finished=lambda trajectory: activity.count_episode(trajectory.success),
        )
    return rollout.trajectories
