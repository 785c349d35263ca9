"""The critic: what it learns from the simulator's states of earlier rollouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl.critic import (
    FORGET_AFTER,
    INPUT_LIMIT,
    Critic,
    explained_variance,
    old_and_new_rows,
    predict_success,
    predict_then_remember,
)
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


def played_by_chance(count: int, seed: int, task_id: int = 0, success_rate: float = 0.7) -> list[Trajectory]:
    """Episodes of 20 decisions whose states, of 40 numbers, say nothing about their outcomes."""
    generator = torch.Generator().manual_seed(seed)
    trajectories = []
    for i in range(count):
        success = torch.rand((), generator=generator).item() < success_rate
        start = torch.randn(40, generator=generator)
        drift = torch.randn(40, generator=generator) / 10
        one = trajectory(20, success, task_id=task_id, index=i)
        decisions = [
            replace(d, observation=observation(*(start + t * drift).tolist()))
            for t, d in enumerate(one.decisions)
        ]
        trajectories.append(replace(one, decisions=decisions))
    return trajectories


def predictions_of(critic: Critic, trajectories: list[Trajectory], seed: int = 0) -> torch.Tensor:
    return predict_success(*old_and_new_rows(critic, trajectories), seed, update_index=1)


@pytest.fixture
def taught(monkeypatch) -> Critic:
    monkeypatch.setattr("rl.critic.PASSES", 100)
    critic = Critic()
    critic.remember(played(40) + played(40, task_id=1))  # states of task 1 are one number longer
    return critic


def test_it_tells_success_from_the_state_for_each_task(taught):
    for task_id in (0, 1):
        new = played(9, task_id)
        won = torch.tensor([float(t.success) for t in new]).repeat_interleave(3)
        assert (predictions_of(taught, new) - won).abs().max() < 0.2


def test_a_task_that_it_has_not_seen_gets_no_extreme_value(taught):
    values = [predictions_of(taught, played(9, task_id=7), seed) for seed in range(3)]
    assert (
        torch.stack(values).std(dim=1).min() > 0.1
    )  # they follow the states; a saturated network says the same to all


def test_networks_learn_in_the_range_in_which_they_are_asked(taught, monkeypatch):
    learned_from = []

    def record(inputs, returns, weights):
        learned_from.append(inputs)
        return torch.nn.Linear(inputs.shape[1], 1)

    monkeypatch.setattr("rl.critic.fit", record)
    taught.remember(played(1, task_id=2))  # of so rare a task the input is far from the mean
    predictions_of(taught, played(1, task_id=2))
    assert learned_from[0].abs().max() == INPUT_LIMIT


def test_values_do_not_know_the_outcomes_they_are_compared_with():
    new = played(9)
    lost = [replace(t, success=False) for t in new]
    critics = Critic(), Critic()
    for critic in critics:
        assert predict_then_remember(critic, played(20), 0, 0) == (None, {})
        predict_then_remember(critic, played(20), 0, 1)
    assert 0 < critics[0].trust <= 1
    values, values_if_lost = (
        predict_then_remember(critic, episodes, 0, 2)[0]
        for critic, episodes in zip(critics, (new, lost), strict=True)
    )
    assert torch.equal(values, values_if_lost)
    assert critics[0].trust > critics[1].trust == 0  # but the next rollout's values do


def test_values_are_near_the_tasks_mean_where_states_say_nothing():
    """Networks that learn a few episodes by heart, or values that believe in them, would be worse than a constant."""
    of_predictions: list[float] = []
    of_values: list[float] = []
    for seed in range(4):
        critic = Critic()
        for update_index in range(3):
            new = played_by_chance(25, 10 * seed + update_index)
            if update_index > 0:
                old_rows, new_rows = old_and_new_rows(critic, new)
                predictions = predict_success(old_rows, new_rows, seed, update_index)
                of_predictions.append(explained_variance(predictions, new_rows.returns))
            values, metrics = predict_then_remember(critic, new, seed, update_index)
            if values is not None:
                of_values.append(metrics["train/explained_variance"])
    assert sum(of_predictions) / len(of_predictions) > -0.2  # -0.7 with 400 steps
    assert sum(of_values) / len(of_values) > -0.1
    not_seen = played_by_chance(5, 99, task_id=3)
    other, _ = predict_then_remember(critic, not_seen, 0, 9)
    assert ((other > 0) & (other < 1)).all()


def test_values_are_a_function_of_what_is_remembered_the_seed_and_the_update(taught):
    first = predictions_of(taught, played(9))
    torch.rand(3)  # what others draw does not matter
    before = torch.get_rng_state()
    assert torch.equal(predictions_of(taught, played(9)), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(predictions_of(taught, played(9), seed=1), first)


def test_the_oldest_episodes_of_a_task_are_forgotten():
    critic = Critic()
    critic.remember(played(1, task_id=1))
    for _ in range(2):
        critic.remember(played(FORGET_AFTER - 10))
    counts = {task_id: len(episodes) for task_id, episodes in critic.episodes.items()}
    assert counts == {0: FORGET_AFTER, 1: 1}
