"""Play the episodes of an evaluation and say how each ended; the same for eval.py and for evaluations in training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from contracts import first_line
from experiment.terminal import Activity, show_progress
from experiment.videos import write_video
from rl.behaviour import Behaviour
from rl.episode_queue import PlayAll
from rl.randomness import Randomness
from rl.ranks import ALONE, Ranks
from rl.rollout import EpisodePlayer
from rl.trajectory import Episode, Trajectory

if TYPE_CHECKING:
    from envs.pool import Pool
    from rl.teacher import TeacherMode
    from vla.policy import Mode, Policy

log = logging.getLogger(__name__)

Actor = Literal["student", "teacher"]
# Who acts in the evaluations of a run; the metric is eval/ROLE_success.
Role = Literal["teacher", "student", "student_sampled", "student_median"]

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
    mode: Literal["greedy", "median", "sample", "l1"]  # vla.policy.Mode, whose import takes seconds
    temperature: float | None  # of mode sample
    success: bool
    env_steps: int  # without the steps in which objects settle at the start
    decisions: int
    seconds: float  # wall time, including the wait for the policy
    entropy: (
        float | None
    )  # estimated by the mean of -log p of the sampled tokens; None where none were sampled
    error: str | None  # a simulator fault after which the episode was played again
    video: str | None  # its file in the folder of videos

    @property
    def key(self) -> EpisodeKey:
        return EpisodeKey(self.task_suite, self.task_id, self.fresh, self.init_state_id, self.repeat)

    @property
    def ending(self) -> str:
        return "success" if self.success else "failure"

    @property
    def player(self) -> Player:
        return Player(self.mode, self.temperature, self.actor)

    @property
    def role(self) -> Role:
        if self.actor == "teacher":
            return "teacher"
        if self.mode == "sample":
            return "student_sampled"
        return "student_median" if self.mode == "median" else "student"


@dataclass(frozen=True)
class Player:
    """Who acts in an evaluation, and how."""

    mode: Mode
    temperature: float | None = None  # of mode sample
    actor: Actor = "student"

    @property
    def behaviour(self) -> Behaviour:
        # The L1 head is a part of the pretrained policy, which is the teacher.
        teacher_acts = self.actor == "teacher" or self.mode == "l1"
        teacher_mode: TeacherMode = "greedy" if self.mode == "sample" else self.mode
        return Behaviour(
            epsilon=1.0 if teacher_acts else 0.0,
            temperature=self.temperature or 1.0,
            teacher_mode=teacher_mode,
            student_mode="greedy" if self.mode == "l1" else self.mode,
            keep_observations=False,
        )

    @property
    def name(self) -> str:
        """How it acts, in words."""
        return self.mode if self.temperature is None else f"sampled, T = {self.temperature:g}"


@dataclass(frozen=True)
class Filming:
    """Which episodes are filmed, and the folder of their videos."""

    episodes: Literal["none", "first", "failures", "all"] = "none"
    folder: Path = Path()

    def recorded(self, keys: Sequence[EpisodeKey]) -> set[Episode]:
        """The episodes whose frames are recorded. Which ones fail is known only afterwards."""
        if self.episodes == "none":
            return set()
        return {key.episode for key in (keys[:1] if self.episodes == "first" else keys)}


NO_VIDEOS = Filming()


def evaluate(
    policy: Policy,
    pool: Pool,
    keys: Sequence[EpisodeKey],
    player: Player,
    seed: int,
    max_batch: int | None = None,
    filming: Filming = NO_VIDEOS,
    ranks: Ranks = ALONE,
    on_result: Callable[[EpisodeResult], None] | None = None,
) -> list[EpisodeResult]:
    """Play each episode once. Every rank plays a part of them; all ranks get all results, in the order of `keys`.

    The random numbers depend on the seed and the episode alone, so that a difference between two evaluations comes from
    the policy. on_result: called with each result on the rank that played it, as soon as the episode has ended.
    """
    keys_by_episode = {key.episode: key for key in keys}
    num_of_rank = len(keys[ranks.rank :: ranks.size])
    recorded = filming.recorded(keys)
    name = f"{player.actor}, {player.name}"
    with show_progress(name, num_of_rank, "episodes", ranks.is_main) as activity:
        recorder = _Recorder(policy.action_dim, keys_by_episode, player, filming, activity, on_result)
        episode_player = EpisodePlayer(
            policy, pool, player.behaviour, Randomness(seed, "evaluation"), max_batch, recorded
        )
        for trajectory in episode_player.play(PlayAll(keys_by_episode, ranks)):
            recorder.add(trajectory)
    results = {result.key: result for part in ranks.gather(recorder.results) for result in part}
    return [results[key] for key in keys]


@dataclass
class _Recorder:
    """Makes the results of the episodes that this rank plays."""

    action_dim: int
    keys: dict[Episode, EpisodeKey]
    player: Player
    filming: Filming
    activity: Activity
    on_result: Callable[[EpisodeResult], None] | None
    results: list[EpisodeResult] = field(default_factory=list)

    def add(self, trajectory: Trajectory) -> None:
        key = self.keys[trajectory.episode]
        result = EpisodeResult(
            *key,
            self.player.actor,
            self.player.mode,
            self.player.temperature,
            trajectory.success,
            trajectory.env_steps,
            len(trajectory.decisions),
            round(trajectory.seconds, 3),
            _entropy(trajectory, self.action_dim) if self.player.mode == "sample" else None,
            trajectory.fault,
            self.save_video(key, trajectory),
        )
        self.results.append(result)
        self.activity.count_episode(result.success)
        if self.on_result is not None:
            self.on_result(result)

    def save_video(self, key: EpisodeKey, trajectory: Trajectory) -> str | None:
        """Write the video of a filmed episode; return its name, or None if there is none or it cannot be written."""
        frames = trajectory.frames
        if not frames or (self.filming.episodes == "failures" and trajectory.success):
            return None
        ending = "success" if trajectory.success else "failure"
        name = f"{key}-{self.player.actor}-{self.player.mode}-{ending}.mp4"
        try:
            write_video(self.filming.folder / name, frames)
        except Exception as error:
            log.warning("%s could not be written (%s); the evaluation goes on", name, first_line(error))
            return None
        finally:
            frames.clear()
        return name


def _entropy(trajectory: Trajectory, action_dim: int) -> float:
    """The mean of -log p over the executed tokens of an episode, in nats."""
    total = 0.0
    num_tokens = 0
    for decision in trajectory.decisions:
        assert decision.student_logprobs is not None, "the student's own decisions have log-probs"
        executed = decision.executed * action_dim
        total -= decision.student_logprobs[:executed].sum().item()
        num_tokens += executed
    return round(total / num_tokens, 4)
