"""Crops and colours of training images, against evaluation's crop and the standard library."""

import colorsys

import numpy as np
import pytest
import torch
from PIL import Image

from vla.images import centre_crop
from workshop.augment import CROP_SIDE, adjust_colours, augment, crop, to_levels

SIZE = 60


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """Smooth colour patterns, uint8 (4, 3, SIZE, SIZE)."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    smooth = [
        np.asarray(Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for image in noise
    ]
    return torch.from_numpy(np.stack(smooth).transpose(0, 3, 1, 2).copy())


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
    adjusted = adjust_colours(values, torch.full((1, 1, 1, 1), saturation), torch.full((1, 1, 1, 1), hue))
    ours = adjusted[0].permute(1, 2, 0).reshape(-1, 3).double()
    expected = []
    for pixel in values[0].permute(1, 2, 0).reshape(-1, 3).double().tolist():
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        expected.append(colorsys.hsv_to_rgb((h + hue) % 1.0, min(1.0, s * saturation), v))
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)


def test_every_image_has_draws_of_its_own_and_a_seed_repeats_them(images):
    copies = images[:1].repeat(4, 1, 1, 1)
    augmented = augment(copies, torch.Generator().manual_seed(0))
    assert len(augmented.flatten(1).unique(dim=0)) == 4
    assert torch.equal(augmented, augment(copies, torch.Generator().manual_seed(0)))
