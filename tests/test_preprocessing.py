"""Pixel values against the original image processor (tests/golden), and independence of the batch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vla.preprocessing import ImageProcessor, normalised_levels, pixel_values, pixel_values_on_device

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN / "preprocess.npz"))


@pytest.fixture(scope="module")
def processor():
    return ImageProcessor.load(GOLDEN / "checkpoint")


def test_pixel_values_of_noise_equal_reference(golden, processor):
    stride = golden["stride"]
    pixels = pixel_values(golden["noise_image"][None], processor)
    assert pixels.dtype == np.float32
    np.testing.assert_array_equal(pixels[None, :, ::stride, ::stride], golden["noise_pixel_values"])


def test_a_gpu_computes_the_same_pixel_values(processor):
    images = np.random.default_rng(0).integers(0, 256, (2, 2, 224, 224, 3), dtype=np.uint8)
    pixels = pixel_values_on_device(torch.from_numpy(images), torch.from_numpy(normalised_levels(processor)))
    np.testing.assert_array_equal(pixels.numpy(), pixel_values(images, processor))


def test_the_one_file_of_transformers_5_is_read(processor, tmp_path):
    stored = {"image_processor": json.loads((GOLDEN / "checkpoint" / "preprocessor_config.json").read_text())}
    (tmp_path / "processor_config.json").write_text(
        json.dumps(stored | {"processor_class": "PrismaticProcessor"})
    )
    assert ImageProcessor.load(tmp_path) == processor
