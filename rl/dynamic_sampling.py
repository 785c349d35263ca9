"""The rollout of an update, with or without dynamic sampling (DAPO, Yu et al. 2025, section 3.2).

A group whose episodes all succeed, or all fail, has no relative advantage, so nothing is learned from it. Dynamic
sampling drops groups whose success rate is outside --group-success-bounds, and plays more groups instead.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from configs.config import TrainConfig
from rl.behaviour import behaviour_in
from rl.phases import PhaseState
from rl.randomness import Randomness
from rl.rollout import Rollout, join_rollouts, play_episodes
from rl.trajectory import Episode, Trajectory

if TYPE_CHECKING:
    from envs.pool import Pool
    from rl.update import Learner

log = logging.getLogger(__name__)


def training_rollout(
    learner: Learner,
    pool: Pool,
    episodes: Iterable[Episode],
    phase: PhaseState,
    config: TrainConfig,
    update_index: int,
    n_steps: int,
    episode_length: float,
    on_steps: Callable[[int], None] = lambda env_steps: None,
) -> tuple[Rollout, list[Trajectory]]:
    """Play about `n_steps` env steps as the phase says. Returns the rollout, and the trajectories to learn from.

    These are all trajectories of the rollout without --dynamic-sampling, and in the warmup, which learns from every
    episode. With --dynamic-sampling episodes are played until the kept groups hold `n_steps` env steps, but at most
    about twice `n_steps` in all; the rollout holds all episodes that were played. Iterating over `episodes` must always
    begin with the first one. episode_length: expected env steps of an episode. on_steps: called with the env steps of
    each chunk.
    """
    behaviour = behaviour_in(phase, config, learner.teacher_mode, episode_length)

    def play(first_group: int, n_steps: int) -> Rollout:
        return play_episodes(
            learner.policy,
            pool,
            (episode for episode in episodes if episode.group >= first_group),
            behaviour,
            Randomness(config.run.seed, "rollout", update_index),
            n_steps,
            config.model.max_batch,
            learner.ranks,
            on_steps=on_steps,
        )

    if phase.distils or not config.rollout.dynamic_sampling:
        rollout = play(0, n_steps)
        return rollout, rollout.trajectories
    return play_until_enough_is_kept(play, n_steps, config.rollout.group_success_bounds)


def play_until_enough_is_kept(
    play: Callable[[int, int], Rollout], n_steps: int, bounds: tuple[float, float]
) -> tuple[Rollout, list[Trajectory]]:
    """Play until the groups with a success rate within `bounds` hold `n_steps` env steps, or twice as many were played.

    play(first_group, n_steps) plays about `n_steps` env steps, from that group on. Returns the whole rollout, and the
    trajectories that are kept.
    """
    parts: list[Rollout] = []
    kept: list[Trajectory] = []
    next_group = 0
    steps_to_play = n_steps
    while steps_to_play > 0:
        part = play(next_group, steps_to_play)
        parts.append(part)
        kept += informative_groups(part.trajectories, bounds)
        next_group = part.trajectories[-1].episode.group + 1
        steps_needed = n_steps - sum(trajectory.env_steps for trajectory in kept)
        steps_allowed = 2 * n_steps - sum(part.env_steps for part in parts)
        steps_to_play = min(steps_needed, steps_allowed)
    if steps_needed > 0:
        log.info(
            "dynamic sampling: twice --n-steps env steps were played, %d trajectories are kept", len(kept)
        )
    return join_rollouts(parts, at_the_same_time=False), kept


def informative_groups(trajectories: Sequence[Trajectory], bounds: tuple[float, float]) -> list[Trajectory]:
    """The trajectories of the groups whose success rate lies within `bounds`.

    The trajectories of a group must stand next to each other.
    """
    lowest, highest = bounds
    kept: list[Trajectory] = []
    for _, members in itertools.groupby(trajectories, key=lambda trajectory: trajectory.episode.group):
        group = list(members)
        success_rate = sum(trajectory.success for trajectory in group) / len(group)
        if lowest <= success_rate <= highest:
            kept += group
    return kept
