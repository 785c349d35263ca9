"""Training images: the crop is evaluation's crop at another place, and the colours are those of HSV."""

import colorsys

import numpy as np
import pytest
import torch
from PIL import Image

from vla.augmentation import CROP_SIDE, adjust_colours, adjust_contrast, augment, crop, to_levels
from vla.resampling import centre_crop

SIZE = 60


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


def test_a_crop_at_the_upper_left_begins_with_the_first_pixel_and_one_at_the_lower_right_ends_with_the_last(images):
    values = images.float() / 255
    first = crop(values, torch.zeros(len(images), 2))
    last = crop(values, torch.full((len(images), 2), 1 - CROP_SIDE))
    torch.testing.assert_close(first[..., 0, 0], values[..., 0, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(last[..., -1, -1], values[..., -1, -1], atol=1e-4, rtol=0)


def test_the_crop_of_a_ramp_is_a_ramp_at_the_offset():
    ramp = torch.linspace(0, 1, SIZE)
    top, left = 0.01, 0.04
    down = crop(ramp[None, None, :, None].expand(1, 3, SIZE, SIZE), torch.tensor([[top, left]]))
    across = crop(ramp[None, None, None, :].expand(1, 3, SIZE, SIZE), torch.tensor([[top, left]]))
    torch.testing.assert_close(down[0, 0, :, 7], top + CROP_SIDE * ramp, atol=1e-5, rtol=0)
    torch.testing.assert_close(across[0, 0, 7], left + CROP_SIDE * ramp, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("saturation", "hue"), [(1.0, 0.0), (0.8, 0.05), (1.2, -0.05), (1.5, 0.5)])
def test_saturation_and_hue_are_those_of_the_standard_librarys_hsv(images, saturation, hue):
    values = images[:1].float() / 255
    ours = adjust_colours(values, _constants(saturation), _constants(hue))[0].permute(1, 2, 0).reshape(-1, 3)
    expected = []
    for pixel in values[0].permute(1, 2, 0).reshape(-1, 3).double().tolist():
        h, s, v = colorsys.rgb_to_hsv(*pixel)
        expected.append(colorsys.hsv_to_rgb((h + hue) % 1.0, min(1.0, s * saturation), v))
    torch.testing.assert_close(ours.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)


def test_greys_stay_grey_and_black_stays_black():
    greys = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4).expand(1, 3, 4, 4)
    torch.testing.assert_close(adjust_colours(greys, _constants(1.2), _constants(0.05)), greys)


def test_contrast_keeps_each_colours_mean_and_scales_its_deviation(images):
    values = images.float() / 255
    changed = adjust_contrast(values, _constants(0.8, 0.9, 1.1, 1.2))
    torch.testing.assert_close(changed.mean((2, 3)), values.mean((2, 3)))
    ratios = changed.std((2, 3)) / values.std((2, 3))
    torch.testing.assert_close(ratios, torch.tensor([0.8, 0.9, 1.1, 1.2])[:, None].expand(4, 3))


def test_levels_survive_the_way_to_unit_values_and_back():
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_levels(levels.float() / 255), levels)


def test_every_image_draws_for_itself_and_a_seed_repeats(images):
    same = images[:1].expand(8, -1, -1, -1)
    first, second = (augment(same, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype == torch.uint8
    assert len({image.numpy().tobytes() for image in first}) == 8
