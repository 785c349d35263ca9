"""The simulator of docs/OWN_SIMULATOR.md keeps the contract of `Env`; tests/end_to_end play it in whole runs."""

import numpy as np

from envs.env import ChunkResult, Env, EnvSpec, Start
from tests.end_to_end.reach import load_env_class


def play(env: Env, start: Start) -> list[ChunkResult]:
    """An episode in which the hand goes straight to the goal."""
    results = [env.reset(start)]
    while not results[-1].done:
        direction = np.sign(env.goal - env.hand)
        results.append(env.step_chunk(np.tile(np.append(direction, np.zeros(5)), (8, 1))))
    return results


def test_the_start_decides_the_episode_and_the_goal_can_be_reached():
    env = load_env_class()(EnvSpec("libero_spatial", (0,), num_images=1), 0)
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
