"""Episodes of a rollout: a function of (seed, update), fair to tasks, without replacement, groups in one piece."""

from collections import Counter
from itertools import groupby, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.config import TaskConfig
from rl.episodes import evaluation_episodes, training_episodes
from rl.trajectory import Episode


def first_groups(task: TaskConfig, group_size: int, groups: int, seed: int = 0, update: int = 0) -> list[Episode]:
    return list(islice(training_episodes(task, group_size, seed, update), groups * group_size))


tasks = st.builds(
    TaskConfig,
    task_ids=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple),
    train_init_states=st.tuples(st.integers(0, 3), st.integers(4, 9)),
)


@given(task=tasks, group_size=st.integers(1, 4), seed=st.integers(0, 99), update=st.integers(0, 99))
def test_same_seed_and_update_same_episodes(task, group_size, seed, update):
    assert first_groups(task, group_size, 9, seed, update) == first_groups(task, group_size, 9, seed, update)


def test_another_seed_or_update_draws_other_episodes():
    task = TaskConfig(task_ids=(0, 1, 2))
    drawn = [first_groups(task, 1, 20, seed, update) for seed in range(3) for update in range(3)]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


@given(task=tasks, group_size=st.integers(1, 4))
def test_groups_are_consecutive_and_share_task_and_initial_state(task, group_size):
    episodes = first_groups(task, group_size, 10)
    assert [e.index for e in episodes] == list(range(10 * group_size))
    for number, (group, members) in enumerate(groupby(episodes, key=lambda e: e.group)):
        starts = [(e.task_id, e.init_state_id) for e in members]
        assert group == number
        assert starts == starts[:1] * group_size


@given(task=tasks)
def test_initial_states_repeat_only_after_all_were_used(task):
    states = range(*task.train_init_states)
    episodes = first_groups(task, 1, 3 * len(states) * len(task.task_ids))
    for task_id in task.task_ids:
        drawn = [e.init_state_id for e in episodes if e.task_id == task_id]
        for start in range(0, len(drawn), len(states)):
            assert sorted(drawn[start : start + len(states)]) == list(states)


@given(task=tasks, groups=st.integers(1, 30))
def test_tasks_take_turns(task, groups):
    counts = Counter(e.task_id for e in first_groups(task, 1, groups))
    assert max(counts.values()) - min(counts.get(task_id, 0) for task_id in task.task_ids) <= 1


def test_no_task_always_comes_first():
    task = TaskConfig(task_ids=(3, 4))
    assert {first_groups(task, 1, 1, update=update)[0].task_id for update in range(20)} == {3, 4}


@pytest.mark.parametrize("trials", [1, 3])
def test_evaluation_plays_every_held_out_state_of_every_task_equally_often(trials):
    episodes = evaluation_episodes((2, 5), (40, 44), trials)
    assert Counter((e.task_id, e.init_state_id) for e in episodes) == {
        (task_id, state): trials for task_id in (2, 5) for state in (40, 41, 42, 43)
    }
    assert [e.index for e in episodes] == list(range(8 * trials))
    assert len({(e.group, e.task_id, e.init_state_id) for e in episodes}) == len({e.group for e in episodes}) == 8


def test_training_and_default_evaluation_share_no_initial_state():
    task = TaskConfig()
    trained = {e.init_state_id for e in first_groups(task, 1, 200)}
    evaluated = {e.init_state_id for e in evaluation_episodes(task.task_ids, task.eval_init_states, 1)}
    assert trained == set(range(40))
    assert evaluated == set(range(40, 50))
