"""Collecting: two real episodes of task 0 by one process and by two, and the bookkeeping with a stand-in simulator."""

import json
from collections import Counter
from functools import partial

import numpy as np
import pytest

import envs.demos
from demonstrations import CHUNK_LENGTH, decode_jpeg, encode_jpeg, episode_path, list_episodes, read_episode
from envs.demo_episode import Recipe, attempt_of
from envs.demos import collect, main
from envs.libero import ChunkResult, EnvSpec, LiberoEnv
from envs.playing import noise_bursts
from envs.pool import Pool
from errors import BadInput

RECIPE = Recipe(init_states=(3, 5), noise_scales=(0.3, 0.8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demos")
    assert collect(folder, RECIPE, [0], episodes=2, num_envs=1) == {"success": 2}
    return folder


def test_the_number_of_processes_does_not_change_a_byte(folder, tmp_path):
    collect(tmp_path, RECIPE, [0], episodes=2, num_envs=2)
    assert [path.name for path in list_episodes(tmp_path)] == [path.name for path in list_episodes(folder)]
    for path in list_episodes(folder):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_executing_the_labels_and_the_noise_leads_through_the_frames_to_success(folder):
    attempt, episode = attempt_of(RECIPE, 0, 1), read_episode(episode_path(folder, 0, 1))
    noise = noise_bursts(attempt.noise_scale, 220, attempt.generator)
    executed = episode.actions[: episode.env_steps].astype(np.float64)
    executed[:, :6] = np.clip(executed[:, :6] + noise[: episode.env_steps], -1, 1)
    env = LiberoEnv(EnvSpec("libero_spatial", (0,)), 0)
    env.reset(attempt.init_state_id)
    at = 0
    for step, jpegs, proprio in zip(episode.frame_steps, episode.jpegs, episode.proprio, strict=True):
        if step > at:
            result = env.step_chunk(executed[at:step])
            # The labels are stored as float32, whence the tolerance: of rendered edges, too.
            np.testing.assert_allclose(result.observation.proprio, proprio, atol=1e-4)
            for image, jpeg in zip(result.observation.images, jpegs, strict=True):
                same = decode_jpeg(encode_jpeg(image)).astype(int) - decode_jpeg(jpeg)
                assert np.abs(same).mean() < 1.0
            at = step
    result = env.step_chunk(executed[at:])
    env.close()
    assert result.success
    assert abs(result.env_steps - episode.env_steps) <= 1
    assert (episode.task_id, episode.init_state_id) == (0, attempt.init_state_id)
    assert episode.instruction == env.instruction


def test_no_frame_has_noise_in_its_chunk_although_the_episode_has(folder):
    attempt, episode = attempt_of(RECIPE, 0, 1), read_episode(episode_path(folder, 0, 1))
    noise = noise_bursts(attempt.noise_scale, 220, attempt.generator)
    assert noise[: episode.env_steps].any()
    for step in episode.frame_steps:
        assert not noise[step : step + CHUNK_LENGTH].any()
    assert len(episode.frame_steps) > 5
    assert set((episode.frame_steps - attempt.first_frame) % RECIPE.frame_every) == {0}


def test_the_actions_go_on_beyond_success_with_letting_go(folder):
    for path in list_episodes(folder):
        episode = read_episode(path)
        assert len(episode.actions) == episode.env_steps + CHUNK_LENGTH
        assert (episode.actions[episode.env_steps :] == episode.actions[-1]).all()
        assert episode.actions[-1, 6] == -1.0


def test_objects_are_bowl_and_plate(folder):
    objects = read_episode(list_episodes(folder)[0]).objects
    assert np.linalg.norm(objects[0, :2] - objects[0, 3:5]) > 0.09
    assert np.linalg.norm(objects[-1, :2] - objects[-1, 3:5]) < 0.06
    np.testing.assert_allclose(objects[:, 3:], objects[[0], 3:].repeat(len(objects), 0), atol=0.01)


class FakeDemoEnv:
    """Index 1 fails, index 2 meets a fault of the simulator, all others succeed and leave an empty file."""

    def __init__(self, folder, played, spec, task_id):
        self.folder, self.played, self.task_id = folder, played, task_id

    def reset(self, init_state_id, seed=0, record=False):
        self.played.append((self.task_id, seed))
        success, error = seed not in (1, 2), "it broke" if seed == 2 else None
        if success:
            episode_path(self.folder, self.task_id, seed).touch()
        return ChunkResult(None, success, 0, env_steps=9, done=True, error=error)

    def close(self):
        pass


@pytest.fixture
def played(monkeypatch, tmp_path):
    """(task id, index) of the episodes that the stand-in has played into tmp_path."""
    played: list = []
    make_env = partial(FakeDemoEnv, tmp_path, played)
    monkeypatch.setattr(envs.demos, "make_pool", lambda spec, num_envs, **_: Pool(spec, make_env))
    return played


def test_failures_are_dropped_and_remembered_and_faults_are_played_again(played, tmp_path, capsys):
    assert collect(tmp_path, Recipe(), [0, 1], 4, 1) == Counter(success=4, failure=2, fault=2)
    assert "8/8 episodes: 4 demonstrations, 2 failures, 2 faults" in capsys.readouterr().out
    assert played == [(task_id, index) for task_id in (0, 1) for index in range(4)]
    assert len(list_episodes(tmp_path)) == 4
    played.clear()
    collect(tmp_path, Recipe(), [0, 1], 5, 1)
    assert played == [(0, 2), (0, 4), (1, 2), (1, 4)]


def test_a_line_cut_short_by_a_crash_costs_one_episode_and_a_lost_file_another(played, tmp_path):
    collect(tmp_path, Recipe(), [0], 4, 1)
    journal = tmp_path / "attempts.jsonl"
    failure = next(line for line in journal.read_text().splitlines() if json.loads(line)["outcome"] == "failure")
    journal.write_text(failure[:30])
    episode_path(tmp_path, 0, 3).unlink()
    played.clear()
    collect(tmp_path, Recipe(), [0], 4, 1)
    assert played == [(0, 1), (0, 2), (0, 3)]


def test_a_folder_takes_one_recipe_only(played, tmp_path):
    main(["--out", str(tmp_path), "--episodes", "1"])
    with pytest.raises(BadInput, match='"seed": 0'):
        main(["--out", str(tmp_path), "--episodes", "1", "--seed", "1"])
    assert len(played) == 1


@pytest.mark.parametrize(
    "flags",
    [["--init-states", "40", "51"], ["--init-states", "4", "4"], ["--frame-every", "0"], ["--noise-scales", "-1"],
     ["--num-envs", "0"], ["--task-ids", "10"]],
)  # fmt: skip
def test_flags_that_cannot_be_are_bad_input(tmp_path, flags):
    with pytest.raises(BadInput):
        main(["--out", str(tmp_path / "new"), "--episodes", "1", *flags])


def test_the_held_out_initial_states_are_never_used_by_default():
    attempts = [attempt_of(Recipe(), 0, index) for index in range(400)]
    assert {attempt.init_state_id for attempt in attempts} == set(range(40))


def test_initial_states_and_noise_scales_meet_equally_often():
    attempts = [attempt_of(Recipe(), 0, index) for index in range(160)]
    pairs = Counter((attempt.init_state_id, attempt.noise_scale) for attempt in attempts)
    assert len(pairs) == 40 * len(Recipe().noise_scales)
    assert set(pairs.values()) == {1}


def test_episodes_of_other_seeds_tasks_and_indices_have_other_noise():
    other = [(Recipe(), 0, 0), (Recipe(), 0, 160), (Recipe(), 1, 0), (Recipe(seed=1), 0, 0)]
    draws = [attempt_of(*each).generator.standard_normal() for each in other]
    assert len(set(draws)) == 4
    assert attempt_of(Recipe(), 0, 160).generator.standard_normal() == draws[1]
