"""The curriculum prefers tasks near 50 % success, forgets none, and is a pure function of what was played."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.config import CurriculumConfig, TaskConfig, TrainConfig
from rl.curriculum import absorb_successes, curriculum_metrics, task_preferences, task_probabilities
from rl.episodes import training_episodes
from tests.fakes import trajectory

CONFIG = CurriculumConfig(curriculum=True)


@given(
    success=st.dictionaries(st.integers(0, 9), st.floats(0, 1), min_size=1),
    floor=st.floats(0, 1),
    temperature=st.floats(0.01, 10),
)
def test_probabilities_add_up_and_respect_the_floor(success, floor, temperature):
    config = CurriculumConfig(True, curriculum_temperature=temperature, curriculum_floor=floor)
    found = task_probabilities(list(success), success, config)
    assert sum(found.values()) == pytest.approx(1.0)
    assert min(found.values()) >= floor / len(success) - 1e-12


def test_half_solved_task_is_preferred_and_equally_distant_ones_are_equal():
    found = task_probabilities([0, 1, 2, 3], {0: 0.5, 1: 0.0, 2: 1.0, 3: 0.4}, CONFIG)
    assert found[0] > found[3] > found[1]
    assert found[1] == pytest.approx(found[2])


def test_softmax_of_the_distance_by_hand():
    config = CurriculumConfig(True, curriculum_temperature=0.5, curriculum_floor=0.0)
    found = task_probabilities([0, 1], {0: 0.5, 1: 1.0}, config)
    assert found[0] / found[1] == pytest.approx(2.718281828)  # e^(0.5 / 0.5)


def test_unplayed_task_counts_as_half_solved():
    found = task_probabilities([0, 1], {0: 0.5}, CONFIG)
    assert found[0] == pytest.approx(found[1])


def test_success_average_is_exponential():
    success = {}
    absorb_successes(success, [trajectory(1, True), trajectory(1, False), trajectory(1, True, task_id=3)], alpha=0.9)
    assert success[0] == pytest.approx(0.9 * (0.9 * 0.5 + 0.1))
    assert success[3] == pytest.approx(0.55)


def test_drawn_tasks_follow_the_probabilities_and_groups_never_mix_tasks():
    task = TaskConfig(task_ids=(4, 7))
    episodes = training_episodes(task, 2, seed=0, update=0, probabilities={4: 0.8, 7: 0.2})
    drawn = [next(episodes) for _ in range(2000)]
    assert sum(e.task_id == 4 for e in drawn) / len(drawn) == pytest.approx(0.8, abs=0.05)
    pairs = zip(drawn[::2], drawn[1::2], strict=True)
    assert all((a.task_id, a.init_state_id) == (b.task_id, b.init_state_id) for a, b in pairs)


def test_without_the_flag_tasks_take_turns():
    assert task_preferences(TrainConfig(), {0: 0.1}) is None
    assert curriculum_metrics(None) == {}
