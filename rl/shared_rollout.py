"""A rollout that all ranks play together and of which all of them get every trajectory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from rl.contracts import Policy, Pool
from rl.ranks import Ranks
from rl.rollout import Collected, collect
from rl.trajectory import Episode


def collect_together(
    ranks: Ranks, policy: Policy, pool: Pool, episodes: Iterable[Episode], n_steps: int | None = None, **options: Any
) -> Collected:
    """`rl.rollout.collect`, its episodes divided among the ranks.

    `n_steps` is the total over all ranks: each plays whole groups of its own until it has an equal part of it. All
    ranks see the same sequence of episodes, of which each takes its own, so no two of them play the same initial state
    before all were played, and every episode keeps the random stream that its number gives it.
    """
    if ranks.size == 1:
        return collect(policy, pool, episodes, n_steps=n_steps, **options)
    by_group = n_steps is not None  # else every episode is played anyway: then single ones divide more evenly
    own = (e for e in episodes if (e.group if by_group else e.index) % ranks.size == ranks.rank)
    part = None if n_steps is None else math.ceil(n_steps / ranks.size)
    with policy.keeping_step() if ranks.shard_base else nullcontext():
        collected = collect(policy, pool, own, n_steps=part, **options)
    return united(ranks, collected)


def united(ranks: Ranks, own: Collected) -> Collected:
    """All ranks' trajectories in the order of their episodes, the same on every rank. Frames stay where they are.

    Seconds: those of the slowest rank for the whole, the mean over the ranks for each part.
    """
    without_frames = replace(own, trajectories=[replace(t, frames=[]) for t in own.trajectories])
    parts: Sequence[Collected] = ranks.gather(without_frames)
    trajectories = own.trajectories + [
        t for rank, part in enumerate(parts) if rank != ranks.rank for t in part.trajectories
    ]
    return Collected(
        trajectories=sorted(trajectories, key=lambda t: t.episode.index),
        times={key: sum(part.times[key] for part in parts) / ranks.size for key in own.times},
        wall_s=max(part.wall_s for part in parts),
        errors=sum(part.errors for part in parts),
    )
