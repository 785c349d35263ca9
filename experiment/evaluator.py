"""Play the episodes of an evaluation; the same for eval.py and for evaluations in training."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import imageio.v2 as imageio
import numpy as np
import torch

from contracts import first_line
from envs.pool import Pool
from experiment.episodes import EpisodeKey, EpisodeResult, Rule
from experiment.stored_run import FRAMES_PER_SECOND
from experiment.terminal import show_progress
from rl.episode_order import PlayAll
from rl.episode_player import EpisodePlayer
from rl.randomness import Randomness
from rl.ranks import ALONE, Ranks
from rl.trajectory import Trajectory
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
    # Which episodes fail is known only afterwards.
    num_recorded = {"none": 0, "first": 1}.get(conditions.film, len(keys))
    recorded = {key.episode for key in keys[:num_recorded]}
    player = EpisodePlayer(policy, pool, rule.behaviour, randomness, conditions.max_batch, recorded)
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
                _save_video(f"{key}-{_in_file_name(rule)}", trajectory, conditions),
            )


def _in_file_name(rule: Rule) -> str:
    return rule.name if rule.temperature is None else f"{rule.name}_{rule.temperature:g}"


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


def write_video(path: Path, frames: Sequence[np.ndarray]) -> None:
    """Write frames (H, W, 3) uint8, one per env step, as H.264."""
    path.parent.mkdir(exist_ok=True)  # not its parents: a run folder that was moved away must not come back
    # Without a named format imageio may choose another writer, which does not know these options.
    options = {"fps": FRAMES_PER_SECOND, "macro_block_size": 16, "ffmpeg_log_level": "error"}
    imageio.mimwrite(path, frames, format="FFMPEG", **options)  # type: ignore[call-overload]  # it takes any sequence


def _entropy(trajectory: Trajectory, action_dim: int) -> float:
    """The mean of -log p over the executed tokens of an episode, in nats."""
    executed = [
        decision.student_logprobs[: decision.executed * action_dim]
        for decision in trajectory.decisions
        if decision.student_logprobs is not None
    ]
    return round(-torch.cat(executed).mean().item(), 4)
