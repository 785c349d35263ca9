"""Dynamic sampling: learn only from groups that can teach (DAPO, Yu et al. 2025, section 3.2), within a bound."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from configs.config import RolloutConfig
from rl.rollout import Collected
from rl.trajectory import Episode, Trajectory

log = logging.getLogger("train")


def _comes_before(group: int, episode: Episode) -> bool:
    return episode.group < group


def collect_informative(
    collect_steps: Callable[..., Collected],
    episodes: Callable[[], Iterator[Episode]],
    config: RolloutConfig,
) -> tuple[Collected, list[Trajectory]]:
    """Collect until the groups inside the bounds hold `n_steps` env steps, or `max_extra_steps` more are spent.

    collect_steps(episodes, n_steps=N) plays a rollout; episodes() gives the update's episodes from the first on.
    Returns everything that was played (its env steps all count) and the trajectories of the kept groups.
    """
    played: list[Collected] = []
    kept: list[Trajectory] = []
    next_group = 0
    missing = config.n_steps
    while missing > 0:
        rest = itertools.dropwhile(partial(_comes_before, next_group), episodes())
        collected = collect_steps(rest, n_steps=missing)
        played.append(collected)
        kept += informative(collected.trajectories, config.group_success_bounds)
        next_group = 1 + max(t.episode.group for t in collected.trajectories)
        extra = sum(c.env_steps for c in played) - config.n_steps
        missing = min(config.n_steps - sum(t.env_steps for t in kept), config.max_extra_steps - extra)
        if missing <= 0 and sum(t.env_steps for t in kept) < config.n_steps:
            log.info(
                "dynamic sampling: %d extra env steps spent (--max-extra-steps %d), %d of %d trajectories kept",
                max(0, extra), config.max_extra_steps, len(kept), sum(len(c.trajectories) for c in played),
            )  # fmt: skip
    return merge(played), kept


def informative(trajectories: Sequence[Trajectory], bounds: tuple[float, float]) -> list[Trajectory]:
    """Trajectories of groups whose success rate lies within the bounds (inclusive)."""
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.episode.group].append(trajectory)
    low, high = bounds
    return [
        t for members in groups.values() if low <= sum(m.success for m in members) / len(members) <= high
        for t in members
    ]  # fmt: skip


def merge(parts: Sequence[Collected]) -> Collected:
    """Several rollouts as one."""
    return Collected(
        trajectories=[t for part in parts for t in part.trajectories],
        times={key: sum(part.times[key] for part in parts) for key in parts[0].times},
        wall_s=sum(part.wall_s for part in parts),
        errors=sum(part.errors for part in parts),
    )
