"""Advantages against closed forms and numpy, never against themselves."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.advantages import decision_advantages

outcomes = st.lists(st.booleans(), min_size=1, max_size=24)


def per_trajectory(kind: str, returns: list[float], groups: list[int] | None = None) -> np.ndarray:
    """Advantages of trajectories of one decision each."""
    rows = torch.arange(len(returns))
    groups = torch.tensor([0] * len(returns) if groups is None else groups)
    values = decision_advantages(kind, torch.tensor(returns), groups, rows, torch.zeros_like(rows), discount=1.0)
    return values.numpy()


# Published numbers for n = 8 and k successes: (advantage of a success, of a failure).
GRPO_TABLE = {
    1: (2.4749, -0.3536),
    2: (1.6202, -0.5401),
    3: (1.2076, -0.7246),
    4: (0.9354, -0.9354),
    5: (0.7246, -1.2076),
    6: (0.5401, -1.6202),
    7: (0.3536, -2.4749),
}


@pytest.mark.parametrize(("successes", "expected"), GRPO_TABLE.items())
def test_group_advantages_of_eight_episodes(successes, expected):
    values = per_trajectory("group", [1.0] * successes + [0.0] * (8 - successes))
    assert values[:successes] == pytest.approx(expected[0], abs=5e-5)
    assert values[successes:] == pytest.approx(expected[1], abs=5e-5)


@given(outcomes)
def test_group_advantages_follow_the_closed_form_for_any_group(successes):
    n, k = len(successes), sum(successes)
    values = per_trajectory("group", [float(s) for s in successes])
    if k in (0, n):
        assert (values == 0).all()
        return
    std = math.sqrt(k * (n - k) / (n * (n - 1)))
    expected = [(s - k / n) / (std + 1e-6) for s in successes]
    assert values == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert values.sum() == pytest.approx(0, abs=1e-4)


@given(outcomes)
def test_leave_one_out_is_the_return_minus_the_mean_of_the_others(successes):
    returns = [float(s) for s in successes]
    values = per_trajectory("rloo", returns)
    for i, value in enumerate(values):
        others = returns[:i] + returns[i + 1 :]
        assert value == pytest.approx(returns[i] - np.mean(others) if others else 0.0, abs=1e-6)


@pytest.mark.parametrize("kind", ["group", "rloo"])
@given(first=outcomes, second=outcomes, seed=st.integers(0, 99))
def test_groups_do_not_see_each_other(kind, first, second, seed):
    returns = [float(s) for s in first + second]
    groups = [7] * len(first) + [3] * len(second)
    order = np.random.default_rng(seed).permutation(len(returns))
    mixed = per_trajectory(kind, [returns[i] for i in order], [groups[i] for i in order])
    apart = np.concatenate([per_trajectory(kind, returns[: len(first)]), per_trajectory(kind, returns[len(first) :])])
    assert mixed == pytest.approx(apart[order], abs=1e-6)


@given(outcomes)
def test_batch_advantages_are_standard_scores_over_the_rollout(successes):
    returns = np.array(successes, dtype=np.float64)
    values = per_trajectory("batch", returns.astype(np.float32).tolist(), groups=list(range(len(returns))))
    spread = returns.std(ddof=1) if len(set(successes)) > 1 else math.inf
    assert values == pytest.approx((returns - returns.mean()) / (spread + 1e-6), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["group", "rloo", "batch"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_equal_outcomes_give_exactly_0(kind, size, outcome):
    assert (per_trajectory(kind, [outcome] * size) == 0.0).all()


def test_absolute_advantages_are_the_returns():
    assert per_trajectory("absolute", [1.0, 0.0, 1.0]).tolist() == [1.0, 0.0, 1.0]


def test_discount_runs_from_the_finishing_decision_backwards():
    trajectory, steps_to_end = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([2, 1, 0, 1, 0])
    values = decision_advantages(
        "absolute", torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), trajectory, steps_to_end, discount=0.9
    )
    assert values.numpy() == pytest.approx([0.81, 0.9, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("kind", ["absolute", "group", "rloo", "batch"])
def test_all_decisions_of_a_trajectory_share_its_advantage(kind):
    returns, groups = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0])
    one_each = decision_advantages(kind, returns, groups, torch.arange(3), torch.zeros(3, dtype=torch.int64), 1.0)
    trajectory = torch.tensor([0, 0, 1, 2, 2, 2])
    steps_to_end = torch.tensor([1, 0, 0, 2, 1, 0])
    values = decision_advantages(kind, returns, groups, trajectory, steps_to_end, 1.0)
    assert torch.equal(values, one_each[trajectory])


@pytest.mark.parametrize(("kind", "limit"), [("absolute", 10.0), ("group", 10.0)])
def test_magnitudes_are_clamped_to_10(kind, limit):
    # One success among 400: (1 - 1/400) / 0.05 = 19.95 without the clamp.
    returns = [1.0] + [0.0] * 399 if kind == "group" else [25.0, -25.0]
    values = per_trajectory(kind, returns)
    assert values.max() == limit
    assert values.min() == (-limit if kind == "absolute" else pytest.approx(-0.05, abs=1e-3))
