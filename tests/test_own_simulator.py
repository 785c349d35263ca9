"""The simulator of docs/OWN_SIMULATOR.md keeps the contract of `Env` and plays in a pool."""

import numpy as np
import pytest

from envs.env import ChunkResult, Env, EnvSpec, Start
from envs.pool import Pool
from envs.worker import InlineWorker
from tests.end_to_end.reach import load_env_class

SPEC = EnvSpec("libero_spatial", (0,), num_images=1)


@pytest.fixture(scope="module")
def env_class():
    return load_env_class()


def play(env: Env, start: Start) -> list[ChunkResult]:
    """An episode in which the hand goes straight to the goal."""
    results = [env.reset(start)]
    while not results[-1].done:
        direction = np.sign(env.goal - env.hand)
        results.append(env.step_chunk(np.tile(np.append(direction, np.zeros(5)), (8, 1))))
    return results


def test_the_start_decides_the_episode_and_the_goal_can_be_reached(env_class):
    env = env_class(SPEC, 0)
    first = play(env, Start(3, record=True))
    assert first[-1].success
    assert (
        sum(result.executed for result in first) == first[-1].env_steps == sum(len(r.frames) for r in first)
    )
    play(env, Start(4))
    again = play(env, Start(3))
    for before, after in zip(first[:-1], again[:-1], strict=True):
        np.testing.assert_array_equal(before.observation.images, after.observation.images)
    fresh = env.reset(Start(None, seed=3)).observation
    assert not np.array_equal(fresh.images, first[0].observation.images)


def test_a_pool_plays_it_to_the_step_limit_and_a_fault_is_no_failure(env_class):
    with Pool(SPEC, 1, make_env=env_class, worker_class=InlineWorker) as pool:
        pool.reset(0, 0, Start(0))
        ((_, result),) = pool.ready()
        assert result.observation.images.shape == (1, 256, 256, 3)
        while not result.done:
            pool.step(0, np.zeros((8, 7)))
            ((_, result),) = pool.ready()
        assert (result.env_steps, result.success, result.error) == (80, False, None)
        pool.reset(0, 0, Start(0))
        pool.ready()
        pool.step(0, np.full((8, 7), "no number"))
        ((_, result),) = pool.ready()
        assert result.error is not None
