"""Which episodes are played: reproducible, fair to tasks and initial states over the run, groups in one piece."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.config import TrainConfig
from configs.sections import RolloutConfig, RunConfig, TaskConfig
from experiment.checkpoints import TrainerState
from rl.rollout import Rollout
from rl.training_episodes import TrainingEpisodes, task_probabilities
from rl.trajectory import Trajectory

tasks = st.builds(
    TaskConfig,
    task_ids=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple),
    train_init_states=st.tuples(st.integers(0, 3), st.integers(4, 9)),
    eval_init_states=st.just((40, 50)),
)


FRESH = TaskConfig(task_ids=(0, 1, 2), train_init_states="fresh")


def first_groups(task: TaskConfig, group_size: int, groups: int, seed: int = 0, update: int = 0, **options):
    config = TrainConfig(task=task, rollout=RolloutConfig(group_size=group_size), run=RunConfig(seed=seed))
    episodes = TrainingEpisodes(config, update, **({"groups_drawn": {}} | options))
    return list(itertools.islice(episodes, groups * group_size))


def starts_of_updates(
    task: TaskConfig, updates: list[list[bool]], **options
) -> list[tuple[int, int | None, int]]:
    """Starts of all groups that were played: of each update those that are marked True."""
    state, starts = TrainerState(), []
    for played in updates:
        episodes = first_groups(
            task, 2, len(played), update=state.updates_done, groups_drawn=state.drawn, **options
        )
        trajectories = [Trajectory(episode) for episode in episodes if played[episode.group]]
        starts += [(t.episode.task_id, t.episode.init_state_id, t.episode.seed) for t in trajectories[::2]]
        state.count_update(Rollout(trajectories, {}, wall_s=1.0, errors=0), steps_taken=1)
    return starts


# the order of episodes


@pytest.mark.parametrize("probabilities", [None, {0: 0.1, 1: 0.2, 2: 0.7}])
def test_episodes_are_a_function_of_the_arguments(probabilities):
    for task in (TaskConfig(task_ids=(0, 1, 2)), FRESH):
        first = first_groups(task, 1, 20, 1, task_probabilities=probabilities)
        assert first == first_groups(task, 1, 20, 1, task_probabilities=probabilities)
        assert first != first_groups(task, 1, 20, 2, task_probabilities=probabilities)


@given(task=tasks, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_updates_go_on_with_turns_and_decks_where_the_last_one_stopped(task, lengths):
    whole = starts_of_updates(task, [[True] * sum(lengths)])
    assert starts_of_updates(task, [[True] * length for length in lengths]) == whole


def test_fresh_states_differ_from_group_to_group_and_from_update_to_update_and_are_shared_within_a_group():
    episodes = first_groups(FRESH, 4, 10)
    assert all(e.init_state_id is None and e.seed == episodes[4 * e.group].seed for e in episodes)
    seeds = [seed for _, _, seed in starts_of_updates(FRESH, [[True] * 10] * 3)]
    assert seeds[:10] == [e.seed for e in episodes[::4]]
    assert len(set(seeds)) == 30


@given(task=tasks)
def test_tasks_take_turns_and_initial_states_repeat_only_after_all_were_used(task):
    states = range(*task.train_init_states)
    episodes = first_groups(task, 1, 3 * len(states) * len(task.task_ids))
    for count in range(1, len(episodes)):
        played = Counter(e.task_id for e in episodes[:count])
        assert max(played.values()) - min(played.get(task_id, 0) for task_id in task.task_ids) <= 1
    for task_id in task.task_ids:
        drawn = [e.init_state_id for e in episodes if e.task_id == task_id]
        for start in range(0, len(drawn), len(states)):
            assert sorted(drawn[start : start + len(states)]) == list(states)


# curriculum


def test_tasks_near_half_success_are_preferred_and_none_is_forgotten():
    task = TaskConfig(task_ids=(0, 1, 2, 3, 4))
    success = {0: 0.5, 1: 0.0, 2: 1.0, 3: 0.4}
    shares = task_probabilities(TrainConfig(task=task, rollout=RolloutConfig(curriculum=True)), success)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares[0] > shares[3] > shares[1] > 0.2 / 5
    assert shares[1] == pytest.approx(shares[2])
    assert shares[4] == shares[0]  # not played yet
    drawn = first_groups(task, 2, 1000, task_probabilities=shares)
    for task_id, share in shares.items():
        assert sum(e.task_id == task_id for e in drawn) / len(drawn) == pytest.approx(share, abs=0.05)
    pairs = zip(drawn[::2], drawn[1::2], strict=True)  # groups never mix tasks
    assert all((a.task_id, a.init_state_id) == (b.task_id, b.init_state_id) for a, b in pairs)
