"""What of advantages and weights the gradients of whole updates (test_gradients.py) do not show."""

import math
from dataclasses import replace

import pytest

from configs.sections import LossConfig
from rl.advantages import estimate_advantages, relative_returns
from rl.trajectory import flatten
from tests.fakes import ACTION_DIM, trajectory

GROUP_OR_BATCH = pytest.mark.parametrize("kind", ["group", "batch"])


def advantages(kind: str, successes: list[int], task_ids: list[int] | None = None) -> list[float]:
    """Of trajectories of one decision each, all in one group."""
    played = [trajectory(1, bool(success), 0, i) for i, success in enumerate(successes)]
    for one, task_id in zip(played, task_ids or [0] * len(played), strict=True):
        one.episode = replace(one.episode, task_id=task_id)
    return relative_returns(flatten(played, ACTION_DIM), played, LossConfig(advantage=kind)).tolist()


@GROUP_OR_BATCH
@pytest.mark.parametrize("successes", [[0], [1], [0] * 7, [1] * 7])
def test_where_all_do_equally_well_advantages_are_exactly_0_so_that_nothing_is_run(kind, successes):
    assert not any(advantages(kind, successes))


def test_batch_advantages_compare_episodes_of_the_same_task():
    spread = math.sqrt((3 * 0.25**2 + 0.75**2) / 5)
    values = advantages("batch", [1, 1, 1, 0, 1, 1], task_ids=[0, 0, 1, 1, 1, 1])
    assert values == pytest.approx([x / spread for x in (0, 0, 0.25, -0.75, 0.25, 0.25)], rel=1e-4)


@GROUP_OR_BATCH
def test_magnitudes_are_clamped_to_10(kind):
    values = advantages(kind, [1] + [0] * 399)  # (1 - 1/400) / 0.05 = 19.95 without the clamp
    assert max(values) == 10
    assert min(values) == pytest.approx(-0.05, abs=1e-3)


@pytest.mark.parametrize("kind", ["group", "batch", "gae"])
def test_long_failures_do_not_outweigh_short_successes_where_episodes_are_compared(kind):
    """gae has no critic in its first update, and takes the advantages of batch: with their weights, too."""
    played = [trajectory(2, True, 0, 0), trajectory(2, True, 0, 1), trajectory(6, False, 0, 2)]
    batch = estimate_advantages(flatten(played, ACTION_DIM), played, None, LossConfig(advantage=kind))
    assert (batch.weights * batch.advantages).mean().item() == pytest.approx(0, abs=1e-6)
    assert batch.weights.mean().item() == pytest.approx(1)  # so the learning rate keeps its meaning
