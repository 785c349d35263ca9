"""Against TensorFlow's own outputs (tests/golden/images), Pillow's Lanczos, and closed forms."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vla.resampling import centre_crop, lanczos_resize, lanczos_weights

IMAGES = Path(__file__).parent / "golden" / "images"
RANDOMISED = settings(deadline=None, max_examples=20)


def read_planes(name: str) -> np.ndarray:
    return np.asarray(Image.open(IMAGES / name).convert("RGB")).transpose(2, 0, 1)


def random_planes(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (3, height, width), dtype=np.uint8)


def test_lanczos_equals_tensorflow():
    resized = lanczos_resize(read_planes("prep_0_b_after_jpeg_256.png"), 224)
    np.testing.assert_array_equal(resized, read_planes("prep_0_c_resized_224.png"))


def test_centre_crop_equals_tensorflow():
    cropped = centre_crop(read_planes("prep_0_c_resized_224.png"))
    np.testing.assert_array_equal(cropped, read_planes("model_input_0.png"))


def resized_one_product_at_a_time(planes: np.ndarray, size: int) -> np.ndarray:
    """The definition: float32 products added in the order of the inputs, vertically first."""
    for _ in range(2):
        weights = lanczos_weights(planes.shape[1], size)
        sums = np.zeros((3, size, planes.shape[2]), dtype=np.float32)
        for output, source in np.argwhere(weights):
            sums[:, output] += weights[output, source] * planes[:, source]
        planes = sums.transpose(0, 2, 1)
    return np.clip(np.rint(planes), 0, 255).astype(np.uint8)


def test_lanczos_sums_as_if_one_product_at_a_time_also_half_way_between_two_levels():
    ramp = np.arange(256) // 2  # full of ties when reduced by 7/8
    ties = np.stack([np.broadcast_to(ramp, (256, 256)), np.add.outer(ramp, ramp), np.add.outer(ramp, ramp[::-1])])
    for planes, size in ((ties.astype(np.uint8), 224), (random_planes(256, 192), 112), (random_planes(60, 50), 64)):
        np.testing.assert_array_equal(lanczos_resize(planes, size), resized_one_product_at_a_time(planes, size))


@pytest.mark.parametrize(("height", "width", "size"), [(256, 256, 224), (256, 256, 112), (128, 160, 56), (60, 50, 224)])
def test_lanczos_agrees_with_pillow_in_floating_point(height, width, size):
    planes = random_planes(height, width)
    by_pillow = [Image.fromarray(plane.astype(np.float32)).resize((size, size), Image.LANCZOS) for plane in planes]
    expected = np.clip(np.rint(np.stack([np.asarray(plane) for plane in by_pillow])), 0, 255)
    difference = np.abs(lanczos_resize(planes, size) - expected)
    assert difference.max() <= 1  # level; values within float32 error of x.5 may round either way
    assert (difference > 0).mean() < 1e-3


@pytest.mark.parametrize(("num_in", "num_out"), [(256, 224), (256, 56), (50, 224), (224, 224), (3, 5)])
def test_lanczos_weights_sum_to_one_and_are_symmetric(num_in, num_out):
    weights = lanczos_weights(num_in, num_out)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(weights, weights[::-1, ::-1], atol=2e-5)


def test_lanczos_to_the_same_size_changes_nothing():
    planes = random_planes(64, 64)
    np.testing.assert_array_equal(lanczos_resize(planes, 64), planes)


@RANDOMISED
@given(st.integers(0, 255), st.integers(8, 80), st.integers(8, 80), st.integers(8, 80))
def test_a_constant_image_stays_constant(level, height, width, size):
    resized = lanczos_resize(np.full((3, height, width), level, dtype=np.uint8), size)
    assert (resized == level).all()
    assert (centre_crop(resized) == level).all()


def test_centre_crop_of_a_ramp_samples_the_middle_of_side_sqrt_0_9():
    size = 224
    ramp = np.broadcast_to(np.arange(size, dtype=np.uint8), (3, size, size))
    side = np.sqrt(0.9)
    positions = (1 - side) / 2 * (size - 1) + np.arange(size) * side  # first 5.7218, last 217.2782
    expected = np.floor(positions * (255.5 / 255))
    near_integer = np.abs(positions * (255.5 / 255) - np.rint(positions * (255.5 / 255))) < 1e-3
    assert near_integer.mean() < 0.05
    np.testing.assert_array_equal(centre_crop(ramp)[0, 0][~near_integer], expected[~near_integer])
