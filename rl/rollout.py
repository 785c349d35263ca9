"""A rollout: whole episodes, played in all simulators of all ranks, for training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl.episode_order import EpisodeQueue
from rl.episode_player import EpisodePlayer
from rl.ranks import ALONE, Ranks
from rl.trajectory import Trajectory
from vla.kept_states import store

if TYPE_CHECKING:
    from vla.policy import Policy


@dataclass
class Rollout:
    """Trajectories in the order of their episodes, and how long collecting them took."""

    trajectories: list[Trajectory]
    times: dict[str, float]  # seconds; `sim`, `render` and `preprocess` are summed over the environments
    wall_s: float  # seconds from start to end
    errors: int  # episodes played again after a simulator fault

    @property
    def env_steps(self) -> int:
        return sum(trajectory.env_steps for trajectory in self.trajectories)

    def forget_kept_states(self) -> None:
        """Free the memory of the hidden states that an update has learned from."""
        for trajectory in self.trajectories:
            for decision in trajectory.decisions:
                decision.kept = None


def play_rollout(
    player: EpisodePlayer,
    queue: EpisodeQueue,
    ranks: Ranks = ALONE,
    advance: Callable[[int], None] = lambda env_steps: None,
) -> Rollout:
    """Play the episodes that the queue gives out. Every rank plays a part, and all ranks get all trajectories.

    advance: called with the env steps of each episode that has ended.
    """
    started = time.perf_counter()
    finished: list[Trajectory] = []
    for trajectory in player.play(queue):
        finished.append(trajectory)
        advance(trajectory.env_steps)
    kept = [trajectory for trajectory in finished if queue.keeps(trajectory.episode)]
    rollout = Rollout(kept, player.times, time.perf_counter() - started, player.errors)
    parts = ranks.gather(replace(rollout, trajectories=[*map(with_empty_states, kept)]))
    parts[ranks.rank] = rollout
    share_kept_states(parts, player.policy, ranks)
    return join_rollouts(parts, at_the_same_time=True)


def with_empty_states(trajectory: Trajectory) -> Trajectory:
    """The trajectory with the shapes and types alone of its hidden states, which are too large for a Python object."""
    decisions = [
        decision if decision.kept is None else replace(decision, kept=decision.kept.to("meta"))
        for decision in trajectory.decisions
    ]
    return replace(trajectory, decisions=decisions)


def share_kept_states(parts: Sequence[Rollout], policy: Policy, ranks: Ranks) -> None:
    """Give the hidden states that each rank has kept to all ranks; `parts` are the rollouts of the ranks.

    Each epoch deals the decisions to the ranks anew, so every rank needs all states. Sending a decision's takes less
    than a thousandth of the time in which another rank would compute them again.
    """
    if ranks.size == 1:
        return
    for source, part in enumerate(parts):
        for decision in (d for trajectory in part.trajectories for d in trajectory.decisions):
            if decision.kept is not None:
                states = ranks.broadcast(decision.kept, source, policy.device)
                if source != ranks.rank:
                    (decision.kept,) = store([states], policy.kept_on)


def join_rollouts(parts: Sequence[Rollout], at_the_same_time: bool) -> Rollout:
    """Join rollouts that ranks have played at the same time, or that were played one after another."""
    trajectories = [trajectory for part in parts for trajectory in part.trajectories]
    times = {name: sum(part.times[name] for part in parts) for name in parts[0].times}
    wall_s = sum(part.wall_s for part in parts)
    if at_the_same_time:
        times = {name: seconds / len(parts) for name, seconds in times.items()}
        wall_s = max(part.wall_s for part in parts)
    return Rollout(
        trajectories=sorted(trajectories, key=lambda trajectory: trajectory.episode.index),
        times=times,
        wall_s=wall_s,
        errors=sum(part.errors for part in parts),
    )
