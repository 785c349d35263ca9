"""What training reads is what the policy will see and do: pixels, state, prompt, tokens and statistics."""

import numpy as np
import pytest
import torch

from contracts import Observation, write_json
from demonstrations import read_episode
from errors import BadInput
from tests.demo_episodes import FRAME_GAP, FRAMES, INSTRUCTIONS, raw_images, write_demos
from tests.small_checkpoint import SMALL, make_small_checkpoint
from vla.policy import Policy
from vla.preprocessing import ImageProcessor
from vla.sft_data import PixelScale, dataset_statistics, from_env, make_data, read_episodes, split_episodes
from vla.tokens import FIRST_ACTION_TOKEN, to_env

KEY = "libero_spatial_no_noops"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """(folder, the episodes as written): two of each of two instructions of different length."""
    folder = tmp_path_factory.mktemp("demos")
    return folder, write_demos(folder, episodes=4, instructions=2)


@pytest.fixture(scope="module")
def episodes(demos):
    return read_episodes([demos[0]], num_images=2, image_size=SMALL.image_size, workers=2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory, episodes):
    """A policy with the statistics of the demonstrations."""
    folder = make_small_checkpoint(tmp_path_factory.mktemp("policy") / "checkpoint")
    write_json(folder / "dataset_statistics.json", {KEY: dataset_statistics(episodes)})
    return Policy.load(str(folder), task_suite="libero_spatial")


@pytest.fixture(scope="module")
def data(episodes, policy):
    return make_data(episodes[:3], episodes[3:], policy.statistics, policy.model_inputs.tokenizer, CPU, augment=True)


def _observations(written, episode: int) -> list[Observation]:
    return [
        Observation(images, proprio.astype(np.float64), written[episode].instruction)
        for images, proprio in zip(raw_images(episode), written[episode].proprio, strict=True)
    ]


def test_the_policy_turns_the_targets_back_into_the_labels_within_half_a_bin(demos, policy, data):
    _, written = demos
    actions = policy.actions(data.train.targets.numpy() + FIRST_ACTION_TOKEN)  # (3 * F, 8, 7)
    labels = np.concatenate(
        [[episode.actions[step : step + 8] for step in episode.frame_steps] for episode in written[:3]]
    )
    low, high = policy.statistics.action.q01, policy.statistics.action.q99
    half_bin = (high - low) / 255 / 2
    moved = np.clip(labels, low, high)[..., :6]  # the outermost 2 % are cut off, as in the published data
    assert (np.abs(actions[..., :6] - moved) <= half_bin[:6] * 2 + 1e-6).all()
    inside = (labels[..., :6] > low[:6]) & (labels[..., :6] < high[:6])
    assert (np.abs(actions[..., :6] - moved)[inside] <= np.broadcast_to(half_bin[:6], moved.shape)[inside] + 1e-6).all()
    np.testing.assert_array_equal(actions[..., 6], labels[..., 6])
    assert set(labels[..., 6].ravel()) == {-1.0, 1.0}


def test_held_out_frames_are_the_networks_inputs_for_the_raw_frames(demos, policy, data):
    pixels, ids, _, proprio = policy.model_inputs(_observations(demos[1], 3))
    ours = PixelScale.of(policy.model_inputs.processor, CPU)(data.held_out.images)
    torch.testing.assert_close(ours, pixels, rtol=0, atol=1e-6)
    torch.testing.assert_close(data.held_out.proprio, proprio, rtol=0, atol=1e-6)
    rows, lengths = data.prompts.rows(data.held_out.prompt)
    assert torch.equal(rows[:, : ids.shape[1]], ids)
    assert set(lengths.tolist()) == {ids.shape[1]}


def test_frames_keep_their_own_prompt(demos, policy, data):
    ids, lengths = data.prompts.rows(data.train.prompt)
    for episode in range(3):
        expected = policy.model_inputs.prompt(INSTRUCTIONS[episode % 2])
        for frame in range(FRAMES * episode, FRAMES * (episode + 1)):
            assert torch.equal(ids[frame, : lengths[frame]], expected)


def test_without_augmentation_training_frames_are_cropped_like_held_out_ones(episodes, policy, data):
    plain = make_data(episodes[3:], [], policy.statistics, policy.model_inputs.tokenizer, CPU, augment=False)
    assert torch.equal(plain.train.images, data.held_out.images)
    assert plain.held_out is None
    assert plain.prompts.lengths is None  # one instruction: nothing is padded


def test_statistics_are_those_of_the_labels_with_the_gripper_as_published(demos, episodes):
    _, written = demos
    entry = dataset_statistics(episodes)
    actions = np.concatenate([episode.actions for episode in written]).astype(np.float64)
    proprio = np.concatenate([episode.proprio for episode in written]).astype(np.float64)
    np.testing.assert_allclose(entry["action"]["q01"][:6], np.quantile(actions[:, :6], 0.01, axis=0), rtol=1e-12)
    np.testing.assert_allclose(entry["action"]["q99"][:6], np.quantile(actions[:, :6], 0.99, axis=0), rtol=1e-12)
    np.testing.assert_allclose(entry["proprio"]["q99"], np.quantile(proprio, 0.99, axis=0), rtol=1e-12)
    np.testing.assert_allclose(entry["proprio"]["std"], proprio.std(0), rtol=1e-12)
    assert entry["action"]["mean"][6] == pytest.approx((actions[:, 6] == -1).mean())  # the share of open
    assert (entry["action"]["min"][6], entry["action"]["max"][6]) == (0.0, 1.0)
    assert entry["action"]["mask"] == [True] * 6 + [False]
    assert (entry["num_trajectories"], entry["num_transitions"]) == (4, 4 * (FRAMES * FRAME_GAP + 8))


def test_gripper_conversions_are_inverse():
    actions = np.array([[0.1, 0, 0, 0, 0, 0, -1.0], [0.2, 0, 0, 0, 0, 0, 1.0]])
    assert from_env(actions)[:, 6].tolist() == [1.0, 0.0]
    np.testing.assert_array_equal(to_env(from_env(actions)), actions)


def test_whole_episodes_are_held_out_and_a_seed_repeats_the_split(episodes):
    train, held_out = split_episodes(episodes, 0.3, seed=1)
    assert (len(train), len(held_out)) == (2, 2)  # rounded up
    assert {id(episode) for episode in [*train, *held_out]} == {id(episode) for episode in episodes}
    again = split_episodes(episodes, 0.3, seed=1)
    assert [id(episode) for episode in again[1]] == [id(episode) for episode in held_out]
    assert split_episodes(episodes, 0.0, seed=1)[1] == []
    with pytest.raises(BadInput, match="--holdout"):
        split_episodes(episodes, 0.9, seed=1)


def test_one_image_is_the_first_camera(demos, episodes):
    single = read_episodes([demos[0]], num_images=1, image_size=SMALL.image_size, workers=1)[0]
    np.testing.assert_array_equal(single.images[:, 0], episodes[0].images[:, 0])
    assert single.images.shape[1] == 1


def test_more_images_than_cameras_are_refused(demos):
    cameras = len(read_episode(next(demos[0].glob("*.npz"))).jpegs[0])
    with pytest.raises(BadInput, match="--num-images"):
        read_episodes([demos[0]], num_images=cameras + 1, image_size=SMALL.image_size, workers=1)


def test_pixel_scale_is_the_image_processors(policy):
    processor = policy.model_inputs.processor
    assert isinstance(processor, ImageProcessor)
    black = PixelScale.of(processor, CPU)(torch.zeros(1, 2, 3, 4, 4, dtype=torch.uint8))
    expected = [-m / s for means, stds in zip(processor.means, processor.stds, strict=True)
                for m, s in zip(means, stds, strict=True)]  # fmt: skip
    torch.testing.assert_close(black[0, :, 0, 0], torch.tensor(expected * 2), rtol=1e-6, atol=1e-6)
