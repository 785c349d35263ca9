"""PlayAll: every episode is given out once, and slots rarely change their tasks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.episode_order import PlayAll
from rl.ranks import ALONE
from rl.trajectory import Episode


def make_episodes(counts: list[int]) -> list[Episode]:
    starts = [(task_id, state) for task_id, count in enumerate(counts) for state in range(count)]
    return [Episode(index, task_id, state, index) for index, (task_id, state) in enumerate(starts)]


@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    num_slots=st.integers(1, 8),
    turns=st.randoms(use_true_random=False),
)
def test_every_episode_is_given_out_once_whichever_slot_asks(counts, num_slots, turns):
    episodes = make_episodes(counts)
    schedule = PlayAll(episodes, ALONE)
    given_out = [schedule.next_for(turns.randrange(num_slots)) for _ in episodes]
    assert sorted(episode.index for episode in given_out) == [episode.index for episode in episodes]
    assert schedule.next_for(0) is None


@pytest.mark.parametrize(("num_slots", "most_changes"), [(1, 9), (3, 9), (10, 0), (15, 10)])
def test_slots_keep_their_tasks(num_slots, most_changes):
    """Ten tasks of 50 episodes. In the order of the tasks each slot would play each task: 9 changes a slot."""
    schedule = PlayAll(make_episodes([50] * 10), ALONE)
    tasks: dict[int, list[int]] = {slot: [] for slot in range(num_slots)}
    for turn in range(500):
        tasks[turn % num_slots].append(schedule.next_for(turn % num_slots).task_id)
    changes = sum(a != b for played in tasks.values() for a, b in itertools.pairwise(played))
    assert changes <= most_changes
    assert [played[0] for played in tasks.values()] == [slot % 10 for slot in range(num_slots)]
