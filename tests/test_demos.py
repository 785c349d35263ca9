"""Collecting: two real episodes of task 0, by one process and by two."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import workshop.demos
from contracts import BadInput, locked
from envs.env import EnvSpec
from envs.libero import LiberoEnv
from vla.images import decode_jpeg, encode_jpeg
from vla.tokens import NUM_BINS
from workshop import noisy_episode
from workshop.demo_files import CHUNK_LENGTH, episode_path, list_episodes, read_episode
from workshop.demos import DemosArgs, collect
from workshop.noisy_episode import Attempt, attempt_of, record_episode

DISTANCES_CM = (2.0, 4.0, 6.0, 8.0)


def _args(out: Path, **changes) -> DemosArgs:
    return DemosArgs(out, **({"episodes": 2} | changes))


@pytest.fixture(scope="module")
def env():
    env = LiberoEnv(EnvSpec("libero_spatial", (0,)), 0)
    yield env
    env.close()


@pytest.fixture
def attempt(env) -> Attempt:
    """Of the second episode in `folder`."""
    return attempt_of(env, seed=0, index=1, distances_cm=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demos")
    assert collect(_args(folder)) == Counter(success=2)
    return folder


def test_the_same_command_plays_what_is_missing_and_processes_do_not_change_a_byte(folder, tmp_path):
    again = shutil.copytree(folder, tmp_path / "again")
    episode_path(again, 0, 1).unlink()
    assert collect(_args(again, num_envs=2, episodes=3)) == Counter(success=2)
    assert [path.name for path in list_episodes(again)] == [episode_path(again, 0, i).name for i in range(3)]
    for path in list_episodes(folder):
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_executing_the_labels_and_the_noise_leads_through_the_frames_to_success(folder, env, attempt):
    episode = read_episode(episode_path(folder, 0, 1))
    executed = episode.actions[: episode.env_steps].astype(np.float64)
    executed[:, :6] = np.clip(executed[:, :6] + attempt.noise[: episode.env_steps], -1, 1)
    env.reset(attempt.start)
    executed_until = 0
    for step, jpegs, proprio in zip(episode.frame_steps, episode.jpegs, episode.proprio, strict=True):
        if step > executed_until:
            result = env.step_chunk(executed[executed_until:step])
            # The labels are stored as float32, so states and rendered edges differ a little.
            np.testing.assert_allclose(result.observation.proprio, proprio, atol=1e-4)
            for image, jpeg in zip(result.observation.images, jpegs, strict=True):
                difference = decode_jpeg(encode_jpeg(image)).astype(int) - decode_jpeg(jpeg)
                assert np.abs(difference).mean() < 1.0
            executed_until = step
    result = env.step_chunk(executed[executed_until:])
    assert result.success
    assert abs(result.env_steps - episode.env_steps) <= 1
    assert episode.task_id == 0
    assert (episode.instruction, episode.looks) == (env.instruction, "lowpoly")


def fullest_bins(labels: np.ndarray) -> np.ndarray:
    """The share of the labels (T, 7) in the fullest bin, for each of the six motions, (6,).

    A share far above the others is a spike (workshop/noisy_episode.py says what follows); of 256 equal ones each would
    be 0.4 %. The bins divide the range from the 1st to the 99th percentile, as the action tokens do; values beyond it
    fall into the outermost bins.
    """
    motions = labels[:, :6].astype(np.float64)
    low, high = np.quantile(motions, [0.01, 0.99], axis=0)
    places = (motions.clip(low, high) - low) / (high - low)  # in [0, 1]
    counts = [np.histogram(values, NUM_BINS, (0.0, 1.0))[0].max() for values in places.T]
    return np.array(counts) / len(motions)


def test_no_value_of_a_motion_is_a_spike_among_the_labels(env, monkeypatch):
    """A spike is what an unsure policy does greedily: the robot stood still, while sampling solved the task."""
    monkeypatch.setattr(noisy_episode, "FRAME_EVERY", 10_000)  # env steps: only the first frame is rendered
    labels = []
    for index in range(5):
        result, episode = record_episode(env, attempt_of(env, 0, index, DISTANCES_CM), looks="")
        assert result.success
        labels.append(episode.actions)
    motions = np.concatenate(labels)[:, :6]
    assert (fullest_bins(motions) < 0.05).all()
    # No frame is without motion, as in LIBERO's `no_noops` data.
    assert np.linalg.norm(motions, axis=1).min() > 1e-3


def test_no_frame_has_noise_in_its_chunk_although_the_episode_has(folder, attempt):
    episode = read_episode(episode_path(folder, 0, 1))
    assert attempt.noise[: episode.env_steps].any()
    for step in episode.frame_steps:
        assert not attempt.noise[step : step + CHUNK_LENGTH].any()
    assert len(episode.frame_steps) > 5


def test_a_folder_takes_one_recipe_and_one_simulator_only(folder, monkeypatch):
    with pytest.raises(BadInput, match="seed"):
        collect(_args(folder, seed=1))
    monkeypatch.setattr(workshop.demos, "simulator_versions", lambda: {"mujoco": "3.9"})
    with pytest.raises(BadInput, match="simulator"):
        collect(_args(folder))


def test_a_second_program_on_the_same_folder_is_refused(folder):
    with locked(folder / ".lock", "the first program"), pytest.raises(BadInput, match="being written"):
        collect(_args(folder))


def test_an_episode_draws_how_far_its_objects_are_moved(env):
    distances = Counter(attempt_of(env, 0, index, DISTANCES_CM).moved_m for index in range(300))
    assert distances.keys() == {0.0, 0.02, 0.04, 0.06, 0.08}
    assert min(distances.values()) > 35
