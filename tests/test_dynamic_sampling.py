"""Dynamic sampling keeps the groups that can teach, refills the others, and ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rl.behaviour import Behaviour
from rl.collect import collect, informative_groups
from rl.episode_player import EpisodePlayer
from rl.randomness import Randomness
from rl.rollout import Rollout
from rl.trajectory import Episode, Trajectory
from tests.fakes import CHUNK_LENGTH, FakePolicy, FakePool, Script, trajectory

GROUP = 4
EPISODES = [Episode(index, 0, index, index // GROUP) for index in range(1000)]


def sample(
    successes_of_group: Callable[[int], int], n_steps: int, num_slots: int = 1
) -> tuple[Rollout, list[Trajectory]]:
    """Episodes of one chunk (4 env steps); of the 4 in group g successes_of_group(g) succeed."""

    def script(task_id: int, index: int) -> Script:
        return Script(CHUNK_LENGTH, success=index % GROUP < successes_of_group(index // GROUP))

    pool = FakePool(script, num_slots, order_seed=0)
    player = EpisodePlayer(FakePolicy(), pool, Behaviour(0.0, 1.0), Randomness(0, "rollout"))
    return collect(player, EPISODES, n_steps, bounds=(0.1, 0.9))


@pytest.mark.parametrize(
    ("successes", "bounds", "is_kept"),  # the bounds belong to the interval
    [
        (0, (0.1, 0.9), False),
        (8, (0.1, 0.9), False),
        (1, (0.125, 0.9), True),
        (1, (0.126, 0.9), False),
        (8, (0.0, 1.0), True),
    ],
)
def test_groups_are_kept_by_their_success_rate_each_by_its_own(successes, bounds, is_kept):
    group = [trajectory(1, success=i < successes, group=3, index=i) for i in range(8)]
    mixed = [trajectory(1, success=i < 4, group=4, index=8 + i) for i in range(8)]
    assert informative_groups(group + mixed, bounds) == (group + mixed if is_kept else mixed)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_dropped_groups_are_refilled_with_the_groups_that_follow_and_all_that_was_played_counts(num_slots):
    rollout, kept = sample(lambda group: 4 if group % 2 else 2, 32, num_slots)
    assert sum(t.env_steps for t in kept) >= 32
    assert all(t.episode.group % 2 == 0 for t in kept)
    indices = [t.episode.index for t in rollout.trajectories]
    assert indices == list(range(len(indices)))  # every episode once, none left out
    assert rollout.env_steps == CHUNK_LENGTH * len(indices)
    assert rollout.times["sim"] > 0


@pytest.mark.parametrize("successes", [0, 4])
def test_where_no_group_can_teach_sampling_ends_after_twice_the_env_steps(successes):
    rollout, kept = sample(lambda group: successes, 32)
    assert kept == []
    assert rollout.env_steps == 2 * 32
