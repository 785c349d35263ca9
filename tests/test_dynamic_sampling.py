"""Dynamic sampling: which groups stay, when it stops, and that everything that was played is accounted for."""

import itertools

import pytest

from configs.config import RolloutConfig
from rl.dynamic_sampling import collect_informative, informative, merge
from rl.rollout import Acting, Collected, Randomness, collect
from rl.trajectory import Episode
from tests.fakes import CHUNK_LENGTH, FakePolicy, FakePool, Script, trajectory

GROUP = 4


def config(n_steps: int, max_extra_steps: int, bounds=(0.1, 0.9)) -> RolloutConfig:
    return RolloutConfig(
        n_steps, group_size=GROUP, dynamic_sampling=True, group_success_bounds=bounds, max_extra_steps=max_extra_steps
    )


def all_episodes():
    """Initial state = episode index, so that a script can speak about one episode."""
    return (Episode(i, 0, i, i // GROUP) for i in itertools.count())


def run(successes_of_group, settings: RolloutConfig, num_slots: int = 1):
    """Episodes of one chunk (4 env steps); successes_of_group(g) of the 4 in group g succeed."""
    pool = FakePool(
        lambda _, i: Script(CHUNK_LENGTH, success=i % GROUP < successes_of_group(i // GROUP)), num_slots, order_seed=0
    )
    rounds = []

    def play(episodes, n_steps):
        rounds.append(n_steps)
        return collect(FakePolicy(), pool, episodes, Acting(0.0, 1.0), Randomness(0, "rollout"), n_steps=n_steps)

    collected, kept = collect_informative(play, all_episodes, settings)
    return pool, rounds, collected, kept


def groups_of(trajectories) -> list[int]:
    return sorted({t.episode.group for t in trajectories})


@pytest.mark.parametrize(
    ("successes", "bounds", "kept"),
    [
        (0, (0.1, 0.9), False),
        (1, (0.1, 0.9), True),
        (7, (0.1, 0.9), True),
        (8, (0.1, 0.9), False),
        (1, (0.125, 0.9), True),  # the bounds belong to the interval
        (1, (0.126, 0.9), False),
        (0, (0.0, 1.0), True),
        (8, (0.0, 1.0), True),
    ],
)
def test_groups_of_eight_are_kept_by_their_success_rate(successes, bounds, kept):
    group = [trajectory(1, success=i < successes, group=3, index=i) for i in range(8)]
    assert informative(group, bounds) == (group if kept else [])


def test_groups_are_judged_apart():
    solved = [trajectory(1, success=True, group=0) for _ in range(2)]
    mixed = [trajectory(1, success=i == 0, group=1) for i in range(2)]
    assert informative([solved[0], mixed[0], solved[1], mixed[1]], (0.1, 0.9)) == mixed


def test_informative_groups_need_no_second_round():
    _, rounds, collected, kept = run(lambda g: 2, config(32, 1000))
    assert rounds == [32]
    assert kept == collected.trajectories


@pytest.mark.parametrize("num_slots", [1, 3])
def test_dropped_groups_are_refilled_with_the_groups_that_follow(num_slots):
    pool, _, collected, kept = run(lambda g: 4 if g % 2 else 2, config(32, 1000), num_slots)
    assert sum(t.env_steps for t in kept) >= 32
    assert all(g % 2 == 0 for g in groups_of(kept))
    indices = [t.episode.index for t in collected.trajectories]
    assert indices == list(range(len(indices)))  # every episode once, none left out
    if num_slots == 1:
        assert len(pool.started) == len(indices)


def test_everything_that_was_played_is_returned_for_the_count_of_env_steps():
    pool, _, collected, kept = run(lambda g: 0 if g < 3 else 2, config(16, 1000))
    assert collected.env_steps == CHUNK_LENGTH * len(pool.started)
    assert groups_of(collected.trajectories) == [0, 1, 2, 3]
    assert groups_of(kept) == [3]


def test_without_informative_groups_it_stops_at_the_limit_with_nothing():
    _, _, collected, kept = run(lambda g: 4, config(16, max_extra_steps=48))
    assert kept == []
    assert collected.env_steps == 16 + 48


def test_no_extra_steps_means_one_round():
    _, rounds, collected, _ = run(lambda g: 4, config(16, max_extra_steps=0))
    assert rounds == [16]
    assert collected.env_steps == 16


def test_the_limit_is_exceeded_by_less_than_one_group():
    for limit in range(0, 64, 4):
        _, _, collected, _ = run(lambda g: 4, config(16, max_extra_steps=limit))
        assert limit <= collected.env_steps - 16 < limit + GROUP * CHUNK_LENGTH


def test_merging_adds_up():
    parts = [
        Collected([trajectory(2)], {"sim": 1.0, "wait": 2.0}, wall_s=3.0, errors=1),
        Collected([trajectory(3), trajectory(1)], {"sim": 0.5, "wait": 0.25}, wall_s=1.5, errors=2),
    ]
    merged = merge(parts)
    assert merged.trajectories == parts[0].trajectories + parts[1].trajectories
    assert (merged.times, merged.wall_s, merged.errors) == ({"sim": 1.5, "wait": 2.25}, 4.5, 3)
