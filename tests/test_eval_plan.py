"""Which episodes an evaluation plays."""

import pytest

from errors import BadInput
from rl.eval_plan import Key, Task, episode_of, make_plan


def task(suite="libero_goal", task_id=0, states=50) -> Task:
    return Task(suite, task_id, "name", "do it", 300, states)


def test_the_published_protocol_is_every_initial_state_of_every_task_once():
    keys = make_plan([task(task_id=i) for i in range(10)], 50, 0, {}).keys
    assert sorted(keys) == [Key("libero_goal", i, state, 0) for i in range(10) for state in range(50)]


def test_every_task_comes_once_before_any_comes_twice_and_suites_come_one_after_the_other():
    plan = make_plan([task(task_id=0), task(task_id=3), task("libero_10")], 2, 40, {})
    assert plan.keys == [
        Key("libero_goal", 0, 40, 0), Key("libero_goal", 3, 40, 0),
        Key("libero_goal", 0, 41, 0), Key("libero_goal", 3, 41, 0),
        Key("libero_10", 0, 40, 0), Key("libero_10", 0, 41, 0),
    ]  # fmt: skip
    assert plan.suites == ["libero_goal", "libero_10"]


def test_more_trials_than_initial_states_start_over_with_the_first_allowed_one():
    keys = make_plan([task(states=5)], 5, 3, {}).keys
    assert [(key.init_state_id, key.repeat) for key in keys] == [(3, 0), (4, 0), (3, 1), (4, 1), (3, 2)]


def test_an_episode_keeps_its_random_stream_whatever_else_is_played():
    all_keys = make_plan([task(task_id=i) for i in range(90)], 120, 0, {}).keys
    indices = [episode_of(key).index for key in all_keys]
    assert len(set(indices)) == len(indices)
    (alone,) = make_plan([task(task_id=7)], 1, 33, {}).keys
    assert alone in all_keys
    assert episode_of(alone).index == indices[all_keys.index(alone)]


def test_a_missing_initial_state_is_refused():
    with pytest.raises(BadInput, match="--first-init-state 50: libero_goal task 0 has only 50"):
        make_plan([task()], 1, 50, {})
