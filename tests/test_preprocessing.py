"""Pixel values against the original image processor (tests/golden), and independence of the batch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vla.preprocessing import ImageProcessor, pixel_values

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def processor():
    return ImageProcessor.load(GOLDEN / "checkpoint")


def test_pixel_values_of_noise_equal_reference(processor):
    golden = np.load(GOLDEN / "preprocess.npz")
    stride = golden["stride"]
    images = torch.from_numpy(golden["noise_image"])[None, None]
    pixels = pixel_values(images, *processor.normalisation(images.device)).numpy()
    assert pixels.dtype == np.float32
    np.testing.assert_array_equal(pixels[..., ::stride, ::stride], golden["noise_pixel_values"])


def test_the_one_file_of_transformers_5_is_read(processor, tmp_path):
    stored = {"image_processor": json.loads((GOLDEN / "checkpoint" / "preprocessor_config.json").read_text())}
    (tmp_path / "processor_config.json").write_text(
        json.dumps(stored | {"processor_class": "PrismaticProcessor"})
    )
    assert ImageProcessor.load(tmp_path) == processor
