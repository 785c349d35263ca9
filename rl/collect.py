"""The rollout of an update, with or without dynamic sampling (DAPO, Yu et al. 2025, section 3.2).

A group whose episodes all succeed, or all fail, has no relative advantage, so nothing is learned from it. Dynamic
sampling drops groups whose success rate is outside --group-success-bounds, and plays more groups instead.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

from rl.episode_order import PlaySteps
from rl.episode_player import EpisodePlayer
from rl.ranks import ALONE, Ranks
from rl.rollout import Rollout, join_rollouts, play_rollout
from rl.trajectory import Episode, Trajectory

log = logging.getLogger(__name__)


def collect(
    player: EpisodePlayer,
    episodes: Iterable[Episode],
    n_steps: int,
    bounds: tuple[float, float] | None,
    ranks: Ranks = ALONE,
    advance: Callable[[int], None] = lambda env_steps: None,
) -> tuple[Rollout, list[Trajectory]]:
    """Play about `n_steps` env steps. Returns the whole rollout, and the trajectories to learn from.

    bounds: with dynamic sampling, of a group's success rate; then episodes are played until the kept groups hold
    `n_steps` env steps, or twice as many were played. Without (None), all trajectories are kept. Iterating over
    `episodes` must always begin with the first one. advance: see `play_rollout`.
    """
    parts: list[Rollout] = []
    kept: list[Trajectory] = []
    next_group = 0
    steps_to_play = n_steps
    while steps_to_play > 0:
        first_group = next_group
        new_episodes = (episode for episode in episodes if episode.group >= first_group)
        queue = PlaySteps(new_episodes, steps_to_play, player.pool.num_slots, ranks)
        part = play_rollout(player, queue, ranks, advance)
        parts.append(part)
        kept += part.trajectories if bounds is None else informative_groups(part.trajectories, bounds)
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
