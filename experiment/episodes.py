"""An episode of an evaluation: where it starts, by which rule it is decided, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from experiment.statistics import Successes, count_successes
from rl.behaviour import Behaviour
from rl.teacher_choice import TeacherMode
from rl.trajectory import Episode
from vla.load_options import Mode

Actor = Literal["student", "teacher"]

# An episode's index is composed with these strides. The first is above the number of tasks of any suite (90), the
# second above the number of initial states of any task, the third above all numbers of official states.
TASK_STRIDE = 100
STATE_STRIDE = 10_000
FRESH_STRIDE = 10**9


class EpisodeKey(NamedTuple):
    """Where an episode starts. Episodes of two policies or modes with equal keys are compared as a pair."""

    task_suite: str
    task_id: int
    fresh: bool  # whether LIBERO's placement sampler draws the state, from the seed `init_state_id`
    init_state_id: int
    repeat: int = 0  # how often the same state was played before; above 0 only where the policy samples

    @property
    def episode(self) -> Episode:
        """The episode to play. Its index, and with it its random numbers, depends on the key alone."""
        index = (self.repeat * STATE_STRIDE + self.init_state_id) * TASK_STRIDE + self.task_id
        if self.fresh:
            index += FRESH_STRIDE
            return Episode(index, self.task_id, None, group=index, seed=self.init_state_id)
        return Episode(index, self.task_id, self.init_state_id, group=index)

    def __str__(self) -> str:
        state = f"fresh_state_{self.init_state_id}" if self.fresh else f"init_state_{self.init_state_id}"
        repeat = f"-repeat_{self.repeat}" if self.repeat else ""
        return f"{self.task_suite}-task_{self.task_id}-{state}{repeat}"


@dataclass(frozen=True)
class EpisodeResult:
    """How an episode was played and how it ended."""

    task_suite: str
    task_id: int
    fresh: bool
    init_state_id: int
    repeat: int
    actor: Actor  # teacher: the frozen teacher of a run
    mode: Mode
    temperature: float | None  # of mode sample
    success: bool
    env_steps: int  # without the steps in which objects settle at the start
    decisions: int
    seconds: float  # wall time, including the wait for the policy
    entropy: float | None  # the mean of -log p of the sampled tokens; None where none were sampled
    error: str | None  # a simulator fault after which the episode was played again
    video: str | None  # its file in the folder of videos

    @property
    def key(self) -> EpisodeKey:
        return EpisodeKey(self.task_suite, self.task_id, self.fresh, self.init_state_id, self.repeat)

    @property
    def rule(self) -> Rule:
        return Rule(self.mode, self.temperature, self.actor)


@dataclass(frozen=True)
class Rule:
    """Who decides in an episode, and how."""

    mode: Mode
    temperature: float | None = None  # of mode sample
    actor: Actor = "student"

    @property
    def name(self) -> str:
        """Its name in a run, which samples at one temperature: teacher, greedy, sampled or median."""
        if self.actor == "teacher":
            return "teacher"
        return "sampled" if self.mode == "sample" else self.mode

    def __str__(self) -> str:
        return self.name if self.temperature is None else f"{self.name}, T = {self.temperature:g}"

    @property
    def behaviour(self) -> Behaviour:
        teacher_mode: TeacherMode = "greedy" if self.mode == "sample" else self.mode
        return Behaviour(
            epsilon_start=1.0 if self.actor == "teacher" else 0.0,
            temperature=self.temperature or 1.0,
            teacher_mode=teacher_mode,
            student_mode=self.mode,
            keep_observations=False,
        )


def group_by_rule(episodes: Iterable[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    """The episodes of an evaluation in a run, by the name of the rule: teacher, greedy, sampled, median."""
    groups: dict[str, list[EpisodeResult]] = {}
    for result in episodes:
        groups.setdefault(result.rule.name, []).append(result)
    return groups


def rates_by_rule(episodes: Iterable[EpisodeResult]) -> dict[str, Successes]:
    """The successes of each rule, as `group_by_rule` names them."""
    groups = group_by_rule(episodes)
    return {name: count_successes(result.success for result in played) for name, played in groups.items()}
