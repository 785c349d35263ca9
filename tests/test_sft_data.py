"""What training reads is what the policy will see and do: pixels, state, prompt, tokens and statistics."""

import colorsys

import numpy as np
import pytest
import torch
from PIL import Image

from contracts import BadInput, Observation, write_json
from tests.demo_episodes import FRAME_GAP, FRAMES, raw_images, write_demos
from tests.small_checkpoint import SMALL, make_small_checkpoint
from vla.images import centre_crop
from vla.loading import LoadOptions
from vla.policy import Policy
from workshop.augment import CROP_SIDE, adjust_colours, crop, to_levels
from workshop.sft_data import dataset_statistics, make_observations, read_episodes, split_episodes

KEY = "libero_spatial_no_noops"
SIZE = 60
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """(folder, the episodes as written): two of each of two instructions of different length."""
    folder = tmp_path_factory.mktemp("demos")
    return folder, write_demos(folder, episodes=4, instructions=2)


@pytest.fixture(scope="module")
def episodes(demos):
    return read_episodes([demos[0]], num_images=2, image_size=SMALL.image_size)


@pytest.fixture(scope="module")
def policy(tmp_path_factory, episodes):
    """A policy with the statistics of the demonstrations."""
    folder = make_small_checkpoint(tmp_path_factory.mktemp("policy") / "checkpoint")
    write_json(folder / "dataset_statistics.json", {KEY: dataset_statistics([e for e, _ in episodes])})
    return Policy.load(str(folder), LoadOptions(task_suite="libero_spatial"))


def _observations(written, episode: int) -> list[Observation]:
    return [
        Observation(images, proprio.astype(np.float64), written[episode].instruction)
        for images, proprio in zip(raw_images(episode), written[episode].proprio, strict=True)
    ]


@torch.no_grad()
def test_training_sees_what_the_policy_acts_on(demos, episodes, policy):
    """Pixels, prompts of two lengths, robot state: files of frames against the observations they were made of."""
    observations = [each for episode in range(4) for each in _observations(demos[1], episode)]
    ours = policy.chunk_logits(make_observations(episodes))
    torch.testing.assert_close(ours, policy.chunk_logits(observations), rtol=1e-4, atol=1e-4)


def test_statistics_are_those_of_the_labels_with_the_gripper_as_published(demos, episodes):
    _, written = demos
    entry = dataset_statistics([e for e, _ in episodes])
    actions = np.concatenate([episode.actions for episode in written]).astype(np.float64)
    proprio = np.concatenate([episode.proprio for episode in written]).astype(np.float64)
    np.testing.assert_allclose(
        entry["action"]["q01"][:6], np.quantile(actions[:, :6], 0.01, axis=0), rtol=1e-12
    )
    np.testing.assert_allclose(
        entry["action"]["q99"][:6], np.quantile(actions[:, :6], 0.99, axis=0), rtol=1e-12
    )
    np.testing.assert_allclose(entry["proprio"]["q99"], np.quantile(proprio, 0.99, axis=0), rtol=1e-12)
    np.testing.assert_allclose(entry["proprio"]["std"], proprio.std(0), rtol=1e-12)
    assert entry["action"]["mean"][6] == pytest.approx((actions[:, 6] == -1).mean())  # the share of open
    assert (entry["action"]["min"][6], entry["action"]["max"][6]) == (0.0, 1.0)
    assert entry["action"]["mask"] == [True] * 6 + [False]
    assert (entry["num_trajectories"], entry["num_transitions"]) == (4, 4 * (FRAMES * FRAME_GAP + 8))


def test_whole_episodes_are_held_out_and_a_seed_repeats_the_split(episodes):
    train, held_out = split_episodes(episodes, 0.3, seed=1)
    assert (len(train), len(held_out)) == (2, 2)  # rounded up
    assert {id(episode) for episode in [*train, *held_out]} == {id(episode) for episode in episodes}
    again = split_episodes(episodes, 0.3, seed=1)
    assert [id(episode) for episode in again[1]] == [id(episode) for episode in held_out]
    assert split_episodes(episodes, 0.0, seed=1)[1] == []
    with pytest.raises(BadInput, match="--holdout"):
        split_episodes(episodes, 0.9, seed=1)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """Smooth colour patterns, uint8 (4, 3, SIZE, SIZE)."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    smooth = [np.asarray(Image.fromarray(n).resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for n in noise]
    return torch.from_numpy(np.stack(smooth).transpose(0, 3, 1, 2).copy())


def _constants(*values: float) -> torch.Tensor:
    return torch.tensor(values).reshape(-1, 1, 1, 1)


def test_the_crop_in_the_middle_is_evaluations_centre_crop(images):
    middle = torch.full((len(images), 2), (1 - CROP_SIDE) / 2)
    ours = to_levels(crop(images.float() / 255, middle)).numpy()
    theirs = np.stack([centre_crop(image) for image in images.numpy()])
    difference = np.abs(ours.astype(int) - theirs)
    assert difference.max() <= 1  # a value next to a level's edge may fall on its other side
    assert (difference > 0).mean() < 1e-3


@pytest.mark.parametrize(("saturation", "hue"), [(1.0, 0.0), (0.8, 0.05), (1.2, -0.05), (1.5, 0.5)])
def test_saturation_and_hue_are_those_of_the_standard_librarys_hsv(images, saturation, hue):
    values = images[:1].float() / 255
    ours = adjust_colours(values, _constants(saturation), _constants(hue))[0].permute(1, 2, 0).reshape(-1, 3)
    expected = []
    for pixel in values[0].permute(1, 2, 0).reshape(-1, 3).double().tolist():
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        expected.append(colorsys.hsv_to_rgb((h + hue) % 1.0, min(1.0, s * saturation), v))
    torch.testing.assert_close(ours.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)
