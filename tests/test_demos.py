"""Collecting: two real episodes of task 0 by one process and by two, and the bookkeeping with a stand-in simulator."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import workshop.demos
from contracts import BadInput
from envs.env import EnvSpec
from envs.libero import LiberoEnv
from envs.worker import InlineWorker
from tests.demo_episodes import DiesAtFirst
from vla.images import decode_jpeg, encode_jpeg
from workshop import noisy_episode
from workshop.demo_files import CHUNK_LENGTH, episode_path, list_episodes, read_episode
from workshop.demos import DemosArgs, Player, collect, fullest_bins
from workshop.noisy_episode import Attempt, attempt_of, record_episode

NO_MORE_FRAMES = 10_000  # env steps between two frames: none but the first is rendered
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


def test_the_number_of_processes_does_not_change_a_byte(folder, tmp_path):
    collect(_args(tmp_path, num_envs=2))
    assert [path.name for path in list_episodes(tmp_path)] == [path.name for path in list_episodes(folder)]
    for path in list_episodes(folder):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


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


def test_no_value_of_a_motion_is_a_spike_among_the_labels(env, monkeypatch):
    """A spike is what an unsure policy does greedily: the robot stood still, while sampling solved the task."""
    monkeypatch.setattr(noisy_episode, "FRAME_EVERY", NO_MORE_FRAMES)
    labels = []
    for index in range(10):
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


@pytest.fixture
def played_ids(monkeypatch):
    """(task id, index) of the episodes that a stand-in has played: index 1 fails, index 2 meets a fault."""
    episode_ids: list[tuple[int, int]] = []

    def play(player, episode_id):
        episode_ids.append(episode_id)
        outcome = {1: "failure", 2: "fault"}.get(episode_id[1], "success")
        if outcome == "success":
            episode_path(player._args.out, *episode_id).touch()
        return outcome

    monkeypatch.setattr(Player, "__call__", play)
    monkeypatch.setattr(workshop.demos, "ProcessWorker", InlineWorker)
    return episode_ids


def test_the_same_command_plays_what_is_not_there_again(played_ids, tmp_path):
    assert collect(_args(tmp_path, task_ids=(0, 1), episodes=4)) == Counter(success=4, failure=2, fault=2)
    assert played_ids == [(task_id, index) for task_id in (0, 1) for index in range(4)]
    played_ids.clear()
    collect(_args(tmp_path, task_ids=(0, 1), episodes=5))
    assert played_ids == [(task_id, index) for task_id in (0, 1) for index in (1, 2, 4)]


def test_a_folder_takes_one_recipe_and_one_simulator_only(played_ids, tmp_path, monkeypatch):
    collect(DemosArgs(tmp_path, episodes=1))
    with pytest.raises(BadInput, match="another seed"):
        collect(DemosArgs(tmp_path, episodes=1, seed=1))
    monkeypatch.setattr(workshop.demos, "simulator_versions", lambda: {"mujoco": "3.9"})
    with pytest.raises(BadInput, match="another simulator"):
        collect(DemosArgs(tmp_path, episodes=2))
    assert len(played_ids) == 1


def test_a_worker_that_dies_ends_the_collection_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(workshop.demos, "Player", DiesAtFirst)
    with pytest.raises(BadInput, match="same command"):
        collect(_args(tmp_path, num_envs=2))


def test_an_episode_draws_how_far_its_objects_are_moved(env):
    distances = Counter(attempt_of(env, 0, index, DISTANCES_CM).moved_m for index in range(300))
    assert distances.keys() == {0.0, 0.02, 0.04, 0.06, 0.08}
    assert min(distances.values()) > 35
