"""Against the original image chain and processor (tests/golden), and invariances of the batch."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from contracts import BadInput, Observation
from vla.preprocessing import (
    ImageProcessor,
    jpeg_round_trip,
    model_input_images,
    normalised_levels,
    pixel_values,
    pixel_values_on_device,
    read_observations,
    send,
    write_observations,
)

GOLDEN = Path(__file__).parent / "golden"


def read(name: str) -> np.ndarray:
    return np.asarray(Image.open(GOLDEN / "images" / name).convert("RGB"))


def smooth_frames(*leading: int, seed: int = 0) -> np.ndarray:
    """uint8 (*leading, 256, 256, 3): coarse random colours, enlarged, so that JPEG behaves as with real frames."""
    coarse = np.random.default_rng(seed).integers(0, 256, (*leading, 16, 16, 3), dtype=np.uint8)
    return coarse.repeat(16, axis=-3).repeat(16, axis=-2)


def preprocess(frames: np.ndarray, processor: ImageProcessor) -> np.ndarray:
    return pixel_values(model_input_images(frames, processor.image_size), processor)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "preprocess.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def processor():
    return ImageProcessor.load(GOLDEN / "checkpoint")


@pytest.fixture
def config() -> dict:
    return json.loads((GOLDEN / "checkpoint" / "preprocessor_config.json").read_text())


def load_config(folder: Path, config: object) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return ImageProcessor.load(folder)


def test_jpeg_round_trip_equals_tensorflow():
    np.testing.assert_array_equal(jpeg_round_trip(read("prep_0_a_raw_256.png")), read("prep_0_b_after_jpeg_256.png"))


def test_model_input_equals_tensorflow():
    frames = read("prep_0_a_raw_256.png")[None]
    np.testing.assert_array_equal(model_input_images(frames, 224), read("model_input_0.png")[None])


@pytest.mark.parametrize("name", ["noise", "odd"])
def test_pixel_values_equal_reference(golden, processor, name):
    stride = golden["stride"]
    pixels = pixel_values(golden[f"{name}_image"][None], processor)
    assert pixels.dtype == np.float32
    np.testing.assert_array_equal(pixels[None, :, ::stride, ::stride], golden[f"{name}_pixel_values"])


def test_pixel_values_of_the_golden_images_equal_reference(golden, processor):
    stride = golden["stride"]
    pixels = pixel_values(np.stack([read(f"model_input_{i}.png") for i in range(4)]), processor)
    np.testing.assert_array_equal(pixels[None, :6, ::stride, ::stride], golden["model_input_0_pixel_values"])
    sums = pixels.astype(np.float64).sum(axis=(1, 2)).reshape(4, 6)
    np.testing.assert_allclose(sums, golden["model_input_pixel_values_sum"], rtol=1e-12)


def test_a_batch_equals_its_frames_one_by_one(processor):
    frames = smooth_frames(3, 2)  # three observations of two images
    batch = preprocess(frames, processor)
    assert batch.shape == (3, 12, 224, 224)
    for observation in range(3):
        np.testing.assert_array_equal(preprocess(frames[observation], processor), batch[observation])
        for image in range(2):
            single = preprocess(frames[observation, image : image + 1], processor)
            np.testing.assert_array_equal(single, batch[observation, 6 * image : 6 * image + 6])


def test_a_rotated_view_equals_its_copy_and_is_not_changed(processor):
    frames = smooth_frames(2)
    view = frames[:, ::-1, ::-1]
    before = view.copy()
    np.testing.assert_array_equal(preprocess(view, processor), preprocess(before, processor))
    np.testing.assert_array_equal(view, before)


@pytest.mark.parametrize("images", [np.zeros((1, 256, 256, 3), np.float32), np.zeros((1, 3, 256, 256), np.uint8)])
def test_other_types_and_layouts_are_refused(processor, images):
    with pytest.raises(ValueError, match="uint8 images"):
        preprocess(images, processor)


def test_config_of_the_golden_checkpoint(processor, golden):
    assert processor.image_size == 224
    assert processor.interpolations == (Image.Resampling.BICUBIC,) * 2
    np.testing.assert_array_equal(processor.means, golden["means"])
    np.testing.assert_array_equal(processor.stds, golden["stds"])


def test_rounded_statistics_win_over_published_ones_where_present(tmp_path, config):
    assert load_config(tmp_path, config).means[0] == (0.484375, 0.455078125, 0.40625)
    del config["tvf_normalize_params"]
    assert load_config(tmp_path, config).means[0] == (0.485, 0.456, 0.406)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_sizes", [[3, 224, 224], [3, 384, 384]]),
        ("input_sizes", None),
        ("interpolations", ["bicubic", "magic"]),
        ("tvf_normalize_params", [{"mean": [0.5] * 3, "std": [0.5] * 3}]),
        ("image_resize_strategy", "letterbox"),
        ("tvf_do_letterbox", True),
    ],
)
def test_a_broken_or_unsupported_config_is_refused_naming_the_file(tmp_path, config, field, value):
    config[field] = value
    with pytest.raises(BadInput, match=r"preprocessor_config\.json") as caught:
        load_config(tmp_path, config)
    assert "\n" not in str(caught.value)


def test_a_gpu_computes_the_same_pixel_values(processor):
    images = np.random.default_rng(0).integers(0, 256, (2, 2, 224, 224, 3), dtype=np.uint8)
    pixels = pixel_values_on_device(torch.from_numpy(images), torch.from_numpy(normalised_levels(processor)))
    np.testing.assert_array_equal(pixels.numpy(), pixel_values(images, processor))


def test_a_gpu_gets_a_copy_in_pinned_memory_and_is_not_waited_for(monkeypatch):
    """A stand-in for the pinned memory of a host with a GPU tells how it was sent."""
    content = np.zeros((3, 2), dtype=np.int64)
    pinned = SimpleNamespace(numpy=lambda: content, to=lambda device, non_blocking=False: (device, non_blocking))
    monkeypatch.setattr(torch, "empty_like", lambda tensor, pin_memory: pinned if pin_memory else None)
    tensor = torch.arange(12).view(3, 4)[:, ::2]
    assert send(tensor, torch.device("cuda", 1)) == (torch.device("cuda", 1), True)
    np.testing.assert_array_equal(content, tensor.numpy())


def test_observations_survive_the_file(tmp_path):
    random = np.random.default_rng(0)
    observations = [
        Observation(random.integers(0, 256, (2, 8, 8, 3), dtype=np.uint8), random.normal(size=8), text, prepared)
        for text, prepared in (("pick up the bowl", True), ("öffne die Schublade", False))
    ]
    write_observations(tmp_path / "o.npz", observations)
    for stored, original in zip(read_observations(tmp_path / "o.npz"), observations, strict=True):
        np.testing.assert_array_equal(stored.images, original.images)
        np.testing.assert_array_equal(stored.proprio, original.proprio)
        assert (stored.instruction, stored.prepared) == (original.instruction, original.prepared)


@pytest.mark.parametrize("content", [b"nothing", b"PK\x03\x04 cut off", b""])
def test_a_broken_file_of_observations_is_named(tmp_path, content):
    (tmp_path / "o.npz").write_bytes(content)
    with pytest.raises(BadInput, match=r"o\.npz: holds no observations"):
        read_observations(tmp_path / "o.npz")
