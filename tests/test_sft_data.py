"""What training reads is what the policy will see and do: pixels, state, prompt, tokens and statistics."""

from pathlib import Path

import numpy as np
import pytest
import torch

from contracts import BadInput, write_json
from tests.demo_episodes import make_episode, observations_of, write_demos
from tests.small_checkpoint import SMALL, load_policy, make_small_checkpoint
from workshop.demo_files import RECIPE_FILE, episode_path, read_episode, write_episode
from workshop.demos import DemosArgs
from workshop.sft_data import (
    Episodes,
    dataset_statistics,
    find_demo_folders,
    make_observations,
    read_episodes,
    split_episodes,
)

KEY = "libero_spatial_no_noops"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two episodes of each of two instructions of different length."""
    folder = tmp_path_factory.mktemp("demos")
    write_demos(folder, episodes=4, instructions=2)
    return folder


@pytest.fixture(scope="module")
def episodes(folder) -> Episodes:
    return read_episodes([folder], num_images=2, image_size=SMALL.image_size)


@pytest.fixture(scope="module")
def statistics(episodes) -> dict:
    return dataset_statistics([episode for episode, _ in episodes])


@torch.no_grad()
def test_training_sees_what_the_policy_acts_on(episodes, statistics, tmp_path):
    """Pixels, prompts of two lengths, robot state: files of frames against the observations they were made from."""
    checkpoint = make_small_checkpoint(tmp_path / "checkpoint")
    write_json(checkpoint / "dataset_statistics.json", {KEY: statistics})
    policy = load_policy(checkpoint)
    observations = observations_of([episode for episode, _ in episodes])
    training = policy.chunk_logits(make_observations(episodes))
    torch.testing.assert_close(training, policy.chunk_logits(observations), rtol=1e-4, atol=1e-4)


def test_statistics_are_those_of_the_labels_with_the_gripper_as_published(episodes, statistics):
    actions = np.concatenate([episode.actions for episode, _ in episodes]).astype(np.float64)
    proprio = np.concatenate([episode.proprio for episode, _ in episodes]).astype(np.float64)
    action_entry = statistics["action"]
    np.testing.assert_allclose(action_entry["q01"][:6], np.quantile(actions[:, :6], 0.01, axis=0))
    np.testing.assert_allclose(statistics["proprio"]["q99"], np.quantile(proprio, 0.99, axis=0))
    np.testing.assert_allclose(statistics["proprio"]["std"], proprio.std(0))
    assert action_entry["mean"][6] == pytest.approx((actions[:, 6] == -1).mean())  # 1 is open
    assert (action_entry["min"][6], action_entry["max"][6]) == (0.0, 1.0)
    assert action_entry["mask"] == [True] * 6 + [False]


def test_statistics_are_named_after_the_suite_whose_tasks_were_played(folder, tmp_path):
    write_json(tmp_path / RECIPE_FILE, DemosArgs(tmp_path, task_suite="libero_goal").recipe())
    assert find_demo_folders([str(tmp_path)], None) == ([tmp_path], "libero_goal_no_noops")
    assert find_demo_folders([str(folder)], None) == ([folder], KEY)  # it has no recipe
    with pytest.raises(BadInput, match="--task-suite"):
        find_demo_folders([str(tmp_path), str(folder)], None)


def test_folders_of_two_simulators_are_not_joined(tmp_path):
    for name, mujoco in (("a", "3.2"), ("b", "3.3")):
        recipe = DemosArgs(tmp_path).recipe() | {"simulator": {"mujoco": mujoco}}
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / RECIPE_FILE, recipe)
    with pytest.raises(BadInput, match=r"3\.2.* and .*3\.3"):
        find_demo_folders([str(tmp_path / "a"), str(tmp_path / "b")], None)


def test_whole_episodes_are_held_out_and_a_seed_repeats_the_split():
    names = ["a", "b", "c", "d"]
    train, held_out = split_episodes(names, 0.3, seed=1)
    assert (len(train), len(held_out)) == (2, 2)  # rounded up
    assert sorted(train + held_out) == names
    assert split_episodes(names, 0.3, seed=1) == (train, held_out)


def test_an_episode_comes_back_as_it_was_written_and_a_cut_file_is_refused(tmp_path):
    path = episode_path(tmp_path / "new folder", 7, 12)
    episode = make_episode(0)
    write_episode(path, episode)
    np.testing.assert_equal(vars(read_episode(path)), vars(episode))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadInput, match=r"episode_07_000012\.npz"):
        read_episode(path)
