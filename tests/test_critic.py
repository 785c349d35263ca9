"""The critic: what it learns from the simulator's states of earlier rollouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl.critic import FORGET_AFTER, Critic, predict_values
from rl.trajectory import Trajectory
from tests.fakes import observation, trajectory


def played(count: int, task_id: int = 0) -> list[Trajectory]:
    """Episodes of three decisions: those of task 0 succeed where the first number is positive, of task 1 where not."""
    trajectories = []
    for i in range(count):
        x = (-1) ** i * (0.5 + i % 7 / 7)
        one = trajectory(3, success=(x > 0) == (task_id == 0), task_id=task_id, index=i)
        decisions = [replace(d, observation=observation(x, i % 5, *[1] * task_id)) for d in one.decisions]
        trajectories.append(replace(one, decisions=decisions))
    return trajectories


def values_of(critic: Critic, trajectories: list[Trajectory], seed: int = 0) -> torch.Tensor | None:
    return predict_values(critic, trajectories, seed, update_index=1)


@pytest.fixture
def taught(monkeypatch) -> Critic:
    monkeypatch.setattr("rl.critic.STEPS", 100)
    critic = Critic()
    critic.remember(played(40) + played(40, task_id=1))  # states of task 1 are one number longer
    return critic


def test_it_tells_success_from_the_state_for_each_task(taught):
    for task_id in (0, 1):
        new = played(9, task_id)
        won = torch.tensor([float(t.success) for t in new]).repeat_interleave(3)
        assert (values_of(taught, new) - won).abs().max() < 0.2


def test_values_do_not_know_the_outcomes_they_are_compared_with(taught):
    new = played(9)
    lost = [replace(t, success=False) for t in new]
    assert torch.equal(values_of(taught, new), values_of(taught, lost))
    assert values_of(Critic(), new) is None


def test_values_are_a_function_of_what_is_remembered_the_seed_and_the_update(taught):
    torch.rand(3)  # what others draw does not matter
    first = values_of(taught, played(9))
    before = torch.get_rng_state()
    assert torch.equal(values_of(taught, played(9)), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(values_of(taught, played(9), seed=1), first)


def test_a_single_remembered_decision_gives_values(monkeypatch):
    monkeypatch.setattr("rl.critic.STEPS", 2)
    critic = Critic()
    (one,) = played(1)
    critic.remember([replace(one, decisions=one.decisions[:1])])
    assert values_of(critic, played(3)).isfinite().all()


def test_the_oldest_episodes_of_a_task_are_forgotten():
    critic = Critic()
    critic.remember(played(1, task_id=1))
    for _ in range(2):
        critic.remember(played(FORGET_AFTER - 10))
    counts = {task_id: len(episodes) for task_id, episodes in critic.episodes.items()}
    assert counts == {0: FORGET_AFTER, 1: 1}
