"""Play the episodes of an evaluation; the same for eval.py and for evaluations in training."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from contracts import first_line
from envs.pool import Pool
from experiment.episodes import EpisodeKey, EpisodeResult, Rule
from experiment.terminal import show_progress
from experiment.videos import write_video
from rl.episode_queue import PlayAll
from rl.randomness import Randomness
from rl.ranks import ALONE, Ranks
from rl.rollout import EpisodePlayer
from rl.trajectory import Episode, Trajectory
from vla.policy import Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conditions:
    """How all episodes of an evaluation are played, and which of them are filmed."""

    seed: int
    # Largest number of observations in one forward pass; None: one per simulator.
    max_batch: int | None = None
    film: Literal["none", "first", "failures", "all"] = "none"
    video_folder: Path = Path()

    def recorded(self, keys: Sequence[EpisodeKey]) -> set[Episode]:
        """The episodes whose frames are recorded. Which ones fail is known only afterwards."""
        if self.film == "none":
            return set()
        return {key.episode for key in (keys[:1] if self.film == "first" else keys)}


def evaluate(
    policy: Policy,
    pool: Pool,
    keys: Sequence[EpisodeKey],
    rule: Rule,
    conditions: Conditions,
    ranks: Ranks = ALONE,
) -> list[EpisodeResult]:
    """Play each episode once. Every rank plays a part of them; all ranks get all results, in the order of `keys`.

    Episodes that the simulator cannot play are left out. Raises RuntimeError if it can play none.
    """
    played = list(play_each(policy, pool, keys, rule, conditions, ranks))
    results = {result.key: result for part in ranks.gather(played) for result in part}
    if keys and not results:
        raise RuntimeError("the simulator failed in every episode of the evaluation")
    return [results[key] for key in keys if key in results]


def play_each(
    policy: Policy,
    pool: Pool,
    keys: Sequence[EpisodeKey],
    rule: Rule,
    conditions: Conditions,
    ranks: Ranks = ALONE,
) -> Iterator[EpisodeResult]:
    """Play this rank's part of the episodes, and yield each result as soon as the episode has ended.

    The random numbers depend on the seed and the episode alone, so that a difference between two evaluations comes from
    the policy.
    """
    keys_by_episode = {key.episode: key for key in keys}
    randomness = Randomness(conditions.seed, "evaluation")
    player = EpisodePlayer(
        policy, pool, rule.behaviour, randomness, conditions.max_batch, conditions.recorded(keys)
    )
    num_of_rank = len(keys[ranks.rank :: ranks.size])
    with show_progress(f"evaluation, {rule}", num_of_rank, "episodes", ranks.is_main) as activity:
        for trajectory in player.play(PlayAll(keys_by_episode, ranks)):
            key = keys_by_episode[trajectory.episode]
            activity.count_episode(trajectory.success)
            yield EpisodeResult(
                *key,
                rule.actor,
                rule.mode,
                rule.temperature,
                trajectory.success,
                trajectory.env_steps,
                len(trajectory.decisions),
                round(trajectory.seconds, 3),
                _entropy(trajectory, policy.action_dim) if rule.mode == "sample" else None,
                trajectory.fault,
                _save_video(f"{key}-{rule.name}", trajectory, conditions),
            )


def _save_video(name: str, trajectory: Trajectory, conditions: Conditions) -> str | None:
    """Write the video of a filmed episode; return its file's name, or None if there is none."""
    if not trajectory.frames or (conditions.film == "failures" and trajectory.success):
        return None
    file = f"{name}-{'success' if trajectory.success else 'failure'}.mp4"
    try:
        write_video(conditions.video_folder / file, trajectory.frames)
    except Exception as error:
        log.warning("%s could not be written (%s); the evaluation goes on", file, first_line(error))
        return None
    return file


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
