"""The critic: GAE against a slow sum, and what it learns from the simulator's states of earlier rollouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.advantages import gae, standardised
from rl.critic import FORGET_AFTER, Critic, predict_values
from rl.trajectory import Trajectory, flatten
from tests.fakes import ACTION_DIM, observation, trajectory


def slow_gae(values, rewards, discount, gae_lambda):
    """Equation 16 of Schulman et al. 2016 as a double sum over one episode."""
    n = len(values)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + discount * following[t] - values[t] for t in range(n)]
    return [sum((discount * gae_lambda) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=2, max_size=4),
    discount=st.floats(0.5, 1.0),
    gae_lambda=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
def test_gae_is_the_sum_of_discounted_errors_within_each_episode_standardised(
    lengths, discount, gae_lambda, seed
):
    trajectories = [trajectory(n, success, index=i, group=i) for i, (n, success) in enumerate(lengths)]
    batch = flatten(trajectories, ACTION_DIM)
    values = torch.rand(len(batch), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected, start = [], 0
    for n, success in lengths:
        rewards = [0.0] * (n - 1) + [float(success)]
        expected += slow_gae(values[start : start + n].tolist(), rewards, discount, gae_lambda)
        start += n
    expected = standardised(torch.tensor(expected, dtype=torch.float64)).tolist()
    found = gae(values, batch, trajectories, discount, gae_lambda)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def played(number: int, task_id: int = 0) -> list[Trajectory]:
    """Episodes of three decisions: those of task 0 succeed where the first number is positive, of task 1 where not."""
    found = []
    for i in range(number):
        x = (-1) ** i * (0.5 + i % 7 / 7)
        of_task = trajectory(3, success=(x > 0) == (task_id == 0), task_id=task_id, index=i)
        decisions = [replace(d, observation=observation(x, i % 5, *[1] * task_id)) for d in of_task.decisions]
        found.append(replace(of_task, decisions=decisions))
    return found


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


def test_the_oldest_episodes_of_a_task_are_forgotten():
    critic = Critic()
    critic.remember(played(1, task_id=1))
    for _ in range(2):
        critic.remember(played(FORGET_AFTER - 10))
    assert {task_id: len(of_task) for task_id, of_task in critic.episodes.items()} == {0: FORGET_AFTER, 1: 1}
