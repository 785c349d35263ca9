import numpy as np
import pytest

from envs.libero import ChunkResult, EnvSpec, LiberoEnv
from envs.playing import BURST_STEPS, CLEAN_STEPS, NOISE_WEIGHTS, Job, noise_bursts, play, play_all
from envs.pool import Pool

STEPS = 100_000


@pytest.fixture(scope="module")
def noise():
    return noise_bursts(0.5, STEPS, np.random.default_rng(0))


def test_bursts_have_the_stated_spread(noise):
    noisy = noise[noise.any(axis=1)]
    np.testing.assert_allclose(noisy.std(axis=0), 0.5 * NOISE_WEIGHTS, rtol=0.05)
    np.testing.assert_allclose(noisy.mean(axis=0), 0.0, atol=0.02)


def test_bursts_and_the_quiet_between_them_have_the_stated_lengths(noise):
    edges = np.flatnonzero(np.diff(noise.any(axis=1)))
    lengths = np.diff(edges)  # burst, quiet, burst, ...
    assert not noise[0].any()
    assert (lengths[::2].min(), lengths[::2].max()) == (BURST_STEPS[0], BURST_STEPS[1] - 1)
    assert (lengths[1::2].min(), lengths[1::2].max()) == (CLEAN_STEPS[0], CLEAN_STEPS[1] - 1)


def test_no_scale_is_no_noise():
    assert not noise_bursts(0.0, 200, np.random.default_rng(0)).any()


def test_noise_disturbs_what_is_executed_and_not_the_labels():
    env = LiberoEnv(EnvSpec("libero_spatial", (0,), max_env_steps=30), 0)
    noise = noise_bursts(0.8, 30, np.random.default_rng(3))
    clean, noisy = play(env, 5), play(env, 5, noise, lambda env_step: env_step in (0, 7))
    env.close()
    first = np.flatnonzero(noise.any(axis=1))[0]
    np.testing.assert_array_equal(noisy.labels[: first + 1], clean.labels[: first + 1])
    np.testing.assert_array_equal(clean.executed, clean.labels[:-1])
    expected = np.clip(noisy.labels[:-1, :6] + noise, -1, 1)
    np.testing.assert_array_equal(noisy.executed[:, :6], expected)
    np.testing.assert_array_equal(noisy.executed[:, 6], noisy.labels[:-1, 6])
    assert not np.array_equal(noisy.labels[first + 1], clean.labels[first + 1])  # the expert answers the push
    assert [frame.env_step for frame in noisy.frames] == [0, 7]
    assert not clean.frames


class EchoEnv:
    """Answers every reset with an outcome that names its arguments."""

    def __init__(self, spec, task_id):
        self.task_id = task_id

    def reset(self, init_state_id, seed=0, record=False):
        return ChunkResult(None, False, 0, env_steps=100 * self.task_id + 10 * init_state_id + seed, done=True)

    def close(self):
        pass


def test_every_job_is_played_once():
    jobs = [Job(task_id, init_state_id, seed) for task_id in (0, 1) for init_state_id in (2, 3) for seed in (4, 5)]
    outcomes = list(play_all(Pool(EnvSpec("libero_spatial", (0, 1)), EchoEnv), jobs))
    assert [job for job, _ in outcomes] == jobs
    assert [result.env_steps for _, result in outcomes] == [100 * t + 10 * i + s for t, i, s in jobs]
