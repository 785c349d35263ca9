"""Validation on held-out initial states: teacher, student greedy and student sampled on the same ones (SPEC 8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from configs.config import TrainConfig
from rl.contracts import Policy, Pool, TeacherMode
from rl.episodes import evaluation_episodes
from rl.progress import progress_bar
from rl.ranks import ALONE, Ranks
from rl.rollout import ALL_READY, Acting, Batching, Collected, Randomness, batching_of
from rl.shared_rollout import collect_together
from rl.trajectory import Episode, Trajectory


@dataclass(frozen=True)
class Successes:
    """k successes of n episodes."""

    k: int
    n: int

    @property
    def rate(self) -> float:
        return self.k / self.n

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.k, self.n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.k}/{self.n} = {100 * self.rate:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"

    def metrics(self, name: str) -> dict[str, float]:
        low, high = self.interval
        return {name: self.rate, f"{name}_k": self.k, f"{name}_n": self.n, f"{name}_low": low, f"{name}_high": high}


def count(trajectories: Sequence[Trajectory]) -> Successes:
    return Successes(sum(t.success for t in trajectories), len(trajectories))


def wilson_interval(k: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a success rate, 95 % by default (Wilson 1927).

    >>> low, high = wilson_interval(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    if n == 0:
        return 0.0, 1.0
    rate = k / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)


def evaluate(
    policy: Policy,
    pool: Pool,
    episodes: Sequence[Episode],
    acting: Acting,
    seed: int,
    batching: Batching = ALL_READY,
    record: Callable[[Episode], bool] = lambda _: False,
    on_steps: Callable[[int], None] = lambda _: None,
    on_finished: Callable[[Trajectory], None] = lambda _: None,
    ranks: Ranks = ALONE,
) -> Collected:
    """Play the given episodes by the code that training rollouts use, divided among the ranks.

    The random stream depends on the seed and the episode only, so every evaluation of a run draws the same numbers:
    a difference between two of them comes from the policy.
    """
    return collect_together(
        ranks, policy, pool, episodes, acting=acting, randomness=Randomness(seed, "evaluation"),
        batching=batching, record=record, on_steps=on_steps, on_finished=on_finished,
    )  # fmt: skip


@dataclass(frozen=True)
class Validation:
    """Teacher and student on the same held-out initial states."""

    teacher: Successes
    student: Successes  # greedy
    student_sampled: Successes
    played: dict[str, list[Trajectory]]  # "teacher" (only when it was played now), "student", "student_sampled"
    per_task: dict[str, Successes] = field(default_factory=dict)  # of several tasks: by metric name

    @property
    def filmed(self) -> dict[str, Trajectory]:
        """The first episode of teacher (when it was played now) and greedy student, with its frames."""
        return {actor: played[0] for actor, played in self.played.items() if played[0].frames}

    def metrics(self) -> dict[str, float]:
        return {
            **self.teacher.metrics("eval/teacher_success"),
            **self.student.metrics("eval/student_success"),
            **self.student_sampled.metrics("eval/student_sampled_success"),
            "eval/gap": self.teacher.rate - self.student.rate,
            **{name: successes.rate for name, successes in self.per_task.items()},
        }

    def __str__(self) -> str:
        return f"teacher {self.teacher}, student {self.student}, student sampled {self.student_sampled}"


def validate(
    policy: Policy, pool: Pool, config: TrainConfig, teacher_mode: TeacherMode, known_teacher: Successes | None,
    ranks: Ranks = ALONE,
) -> Validation:  # fmt: skip
    """Evaluate student and teacher; the teacher never changes, so its result is taken from `known_teacher` if given.

    Only sampled decisions are worth repeating: from the same initial state a deterministic policy does the same again.
    """
    task, temperature = config.task, config.rollout.temperature

    def play(acting: Acting, title: str, record_first: bool, trials: int = 1) -> list[Trajectory]:
        episodes = evaluation_episodes(task.task_ids, task.eval_init_states, trials)
        with progress_bar(f"evaluating the {title}", None, shown=ranks.is_main) as on_steps:
            return evaluate(
                policy, pool, episodes, acting, config.run.seed, batching_of(config.rollout),
                record=lambda episode: record_first and episode.index == 0, on_steps=on_steps, ranks=ranks,
            ).trajectories  # fmt: skip

    played = {}
    if known_teacher is None:
        played["teacher"] = play(Acting(1.0, 1.0, teacher_mode, keep_observations=False), "teacher", True)
        known_teacher = count(played["teacher"])
    played["student"] = play(Acting(0.0, temperature, student_mode="greedy", keep_observations=False), "student", True)
    played["student_sampled"] = play(
        Acting(0.0, temperature, keep_observations=False), "student, sampled", False, config.evaluation.eval_trials
    )
    per_task = {
        f"eval/{actor}_success_task_{task_id}": count([t for t in played[actor] if t.episode.task_id == task_id])
        for actor in ("student", "student_sampled")
        for task_id in task.task_ids
    }
    return Validation(
        known_teacher, count(played["student"]), count(played["student_sampled"]), played,
        per_task if len(task.task_ids) > 1 else {},
    )  # fmt: skip
