"""Images against the original TensorFlow code's outputs (tests/golden), and against their definitions."""

import ctypes
import platform
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contracts import BadInput
from vla import images
from vla.images import (
    centre_crop,
    decode_jpeg,
    encode_jpeg,
    lanczos_resize,
    lanczos_weights,
    model_input_images,
    to_levels,
)

GOLDEN = Path(__file__).parent / "golden" / "images"


def read(name: str) -> np.ndarray:
    return np.asarray(Image.open(GOLDEN / f"{name}.png").convert("RGB"))


def random_planes(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (3, height, width), dtype=np.uint8)


def test_jpeg_round_trip_resize_and_crop_equal_tensorflow():
    frame = read("prep_0_a_raw_256")
    after_jpeg = read("prep_0_b_after_jpeg_256")
    resized = read("prep_0_c_resized_224").transpose(2, 0, 1)
    model_input = read("model_input_0")
    np.testing.assert_array_equal(decode_jpeg(encode_jpeg(frame)), after_jpeg)
    np.testing.assert_array_equal(lanczos_resize(after_jpeg.transpose(2, 0, 1), 224), resized)
    np.testing.assert_array_equal(centre_crop(resized), model_input.transpose(2, 0, 1))
    np.testing.assert_array_equal(model_input_images(frame, 224), model_input)


def resized_one_product_at_a_time(planes: np.ndarray, size: int) -> np.ndarray:
    """The definition: float32 products added in the order of the inputs, vertically first."""
    for _ in range(2):
        weights = lanczos_weights(planes.shape[1], size)
        sums = np.zeros((3, size, planes.shape[2]), dtype=np.float32)
        for output, source in np.argwhere(weights):
            sums[:, output] += weights[output, source] * planes[:, source]
        planes = sums.transpose(0, 2, 1)
    return np.clip(np.rint(planes), 0, 255).astype(np.uint8)


def planes_with_ties() -> np.ndarray:
    """uint8 (3, 256, 256), full of values half way between two levels when reduced by 7/8."""
    ramp = np.arange(256) // 2
    horizontal = np.broadcast_to(ramp, (256, 256))
    return np.stack([horizontal, np.add.outer(ramp, ramp), np.add.outer(ramp, ramp[::-1])]).astype(np.uint8)


@pytest.mark.parametrize(
    ("planes", "size"), [(planes_with_ties(), 224), (random_planes(60, 50), 64)], ids=["ties", "enlarged"]
)
def test_lanczos_sums_as_if_one_product_at_a_time(planes, size):
    np.testing.assert_array_equal(lanczos_resize(planes, size), resized_one_product_at_a_time(planes, size))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is another C library")
@pytest.mark.parametrize(("num_in", "num_out"), [(256, 224), (256, 120), (60, 224)])
def test_lanczos_weights_are_those_with_the_sine_of_glibc_which_tensorflow_calls(
    num_in, num_out, monkeypatch
):
    weights = lanczos_weights(num_in, num_out)
    sinf = ctypes.CDLL("libm.so.6").sinf
    sinf.restype = ctypes.c_float
    sinf.argtypes = [ctypes.c_float]
    monkeypatch.setattr(images, "_sine", np.vectorize(sinf, otypes=[np.float32]))
    np.testing.assert_array_equal(weights, lanczos_weights(num_in, num_out))


def test_bytes_and_shares_of_one_mean_the_same_levels_and_other_ranges_are_refused():
    levels = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(to_levels(levels), levels)
    np.testing.assert_array_equal(to_levels(levels.astype(np.float32) / 255), levels)
    for wrong in (levels / 1.0, levels / 127.5 - 1, levels.astype(np.int64), np.array([0.5, np.nan])):
        with pytest.raises(BadInput, match="floats from 0 to 1"):
            to_levels(wrong)


@pytest.mark.parametrize("shape", [(128, 128, 3), (3, 256, 256), (256, 256, 4)])
def test_frames_of_another_shape_are_refused(shape):
    with pytest.raises(BadInput, match="give"):
        model_input_images(np.zeros((2, *shape), np.uint8), 224)
