"""Camera frames -> the network's pixel values. One path for training, evaluation and video.

    frames uint8 (..., n, 256, 256, 3)
      -- model_input_images --> uint8 (..., n, S, S, 3)    what the training data went through
      -- pixel_values -->       float32 (..., 6n, S, S)    what the checkpoint's image processor does

Source: openvla-oft @213c5ff, experiments/robot/openvla_utils.py and prismatic/extern/hf/processing_prismatic.py.
"""

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from contracts import BadInput, Observation, first_line
from untrusted.json_file import as_numbers, as_object, brief, read_json, required
from vla.resampling import centre_crop, lanczos_resize
from vla.statistics import VectorStatistics

NUM_BACKBONES = 2  # DINOv2, SigLIP
CHANNELS_PER_IMAGE = 3 * NUM_BACKBONES


@dataclass(frozen=True)
class ImageProcessor:
    """What preprocessor_config.json says. Tuples have one entry per backbone: DINOv2, SigLIP."""

    image_size: int  # S: 224 in real checkpoints
    means: tuple[tuple[float, ...], ...]  # (2, 3): backbone, RGB; of pixels in [0, 1]
    stds: tuple[tuple[float, ...], ...]  # (2, 3)
    interpolations: tuple[str, ...]  # names of Pillow, for images that aren't S x S

    @classmethod
    def load(cls, folder: str | Path) -> "ImageProcessor":
        """Read a checkpoint folder's preprocessor_config.json. Raises BadInput naming the file and the field."""
        path = Path(folder) / "preprocessor_config.json"
        config = read_json(path)
        _check_strategy(config, str(path))
        sizes = [as_numbers(size, f"{path}: input_sizes", 3) for size in _per_backbone(config, "input_sizes", path)]
        size = int(sizes[0][1])
        if size < 1 or any(s != [3, size, size] for s in sizes):
            raise BadInput(f"{path}: input_sizes: expected one square size [3, S, S] twice, found {brief(sizes)}")
        means, stds = _normalisation(config, path)
        interpolations = tuple(_per_backbone(config, "interpolations", path))
        for name in interpolations:
            if not isinstance(name, str) or name.upper() not in Image.Resampling.__members__:
                raise BadInput(f"{path}: interpolations: {brief(name)} is not a filter of Pillow such as 'bicubic'")
        return cls(size, means, stds, interpolations)


def _check_strategy(config: dict[str, Any], where: str) -> None:
    strategy = config.get("image_resize_strategy", "resize-naive")
    if strategy != "resize-naive" or config.get("tvf_do_letterbox", False):
        raise BadInput(
            f"{where}: image_resize_strategy {brief(strategy)} (letterbox {config.get('tvf_do_letterbox', False)}) "
            "is not supported; OpenVLA-OFT checkpoints use 'resize-naive'"
        )


def _normalisation(config: dict[str, Any], path: Path) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Means and stds per backbone.

    Released checkpoints carry them twice: `means`/`stds` as published, and rounded to bfloat16 in
    `tvf_normalize_params`, which are those that the original processor applies. So the latter win.
    """
    if "tvf_normalize_params" in config:
        where = f"{path}: tvf_normalize_params"
        params = [as_object(p, where) for p in _per_backbone(config, "tvf_normalize_params", path)]
        raw_means, raw_stds = ([required(p, name, where) for p in params] for name in ("mean", "std"))
    else:
        raw_means, raw_stds = _per_backbone(config, "means", path), _per_backbone(config, "stds", path)
    means = tuple(tuple(as_numbers(mean, f"{path}: mean", 3)) for mean in raw_means)
    stds = tuple(tuple(as_numbers(std, f"{path}: std", 3)) for std in raw_stds)
    if any(value <= 0 for std in stds for value in std):
        raise BadInput(f"{path}: std: must be positive, found {brief(stds)}")
    return means, stds


def _per_backbone(config: dict[str, Any], name: str, path: Path) -> list[Any]:
    value = required(config, name, str(path))
    if not isinstance(value, list) or len(value) != NUM_BACKBONES:
        raise BadInput(f"{path}: {name}: expected a list of {NUM_BACKBONES} (DINOv2, SigLIP), found {brief(value)}")
    return value


def model_input_images(frames: np.ndarray, image_size: int) -> np.ndarray:
    """uint8 (..., H, W, 3) RGB -> uint8 (..., S, S, 3): JPEG round trip, Lanczos resize to S, centre crop."""
    _check_images(frames)
    images = np.empty((*frames.shape[:-3], image_size, image_size, 3), dtype=np.uint8)
    for index in np.ndindex(frames.shape[:-3]):
        planes = np.ascontiguousarray(jpeg_round_trip(frames[index]).transpose(2, 0, 1))
        np.stack(list(centre_crop(lanczos_resize(planes, image_size))), axis=-1, out=images[index])
    return images


def jpeg_round_trip(image: np.ndarray) -> np.ndarray:
    """uint8 (H, W, 3) -> the same after JPEG, quality 95, chroma 4:2:0: the training data were stored so.

    Two libraries, because they must differ: TensorFlow encodes with the accurate DCT (as Pillow does; simplejpeg can
    only encode with the fast one) and decodes with the fast DCT and smooth chroma (which only simplejpeg offers).
    """
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, subsampling="4:2:0")
    return simplejpeg.decode_jpeg(file.getbuffer(), colorspace="RGB", fastdct=True, fastupsample=False)


def pixel_values(images: np.ndarray, processor: ImageProcessor) -> np.ndarray:
    """uint8 (..., n, H, W, 3) -> float32 (..., 6n, S, S): per image DINOv2's 3 channels, then SigLIP's 3.

    Images of another size than S x S are resized, aspect ratio not kept, with the processor's interpolation.
    """
    _check_images(images)
    *batch, num_images, _, _, _ = images.shape
    size = processor.image_size
    pixels = np.empty((*batch, num_images, NUM_BACKBONES, 3, size, size), dtype=np.float32)
    levels = normalised_levels(processor)
    for index in np.ndindex(*batch, num_images):
        for backbone, interpolation in enumerate(processor.interpolations):
            planes = _resize_naive(images[index], size, interpolation).transpose(2, 0, 1)
            for channel, plane in enumerate(planes):
                # Not the default mode: that one writes to a buffer first. No level is beyond 255.
                place = (*index, backbone, channel)
                np.take(levels[backbone, channel], plane, out=pixels[place], mode="clip")
    return pixels.reshape(*batch, CHANNELS_PER_IMAGE * num_images, size, size)


def pixel_values_on_device(images: Tensor, levels: Tensor) -> Tensor:
    """The same for images (B, n, S, S, 3) and `normalised_levels` (2, 3, 256) that are on a GPU: (B, 6n, S, S)."""
    channels = torch.arange(CHANNELS_PER_IMAGE, device=images.device).view(NUM_BACKBONES, 3, 1, 1)
    planes = images.permute(0, 1, 4, 2, 3).unsqueeze(2).int()  # (B, n, 1, 3, S, S)
    return levels.flatten()[planes + 256 * channels].flatten(1, 3)


@lru_cache(maxsize=4)
def normalised_levels(processor: ImageProcessor) -> np.ndarray:
    """(2, 3, 256) float32: what each of the 256 levels becomes; looking up is exact and beats computing."""
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    means, stds = (np.array(values, dtype=np.float32)[..., None] for values in (processor.means, processor.stds))
    return (levels - means) / stds


def _resize_naive(image: np.ndarray, size: int, interpolation: str) -> np.ndarray:
    if image.shape[:2] == (size, size):
        return image
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling[interpolation.upper()]))


def _check_images(images: np.ndarray) -> None:
    if images.dtype != np.uint8 or images.ndim < 3 or images.shape[-1] != 3:
        raise ValueError(f"expected uint8 images (..., H, W, 3), found {images.dtype} {images.shape}")


def write_observations(path: Path, observations: Sequence[Observation]) -> None:
    """An .npz of some observations, all of one shape."""
    np.savez_compressed(
        path,
        images=np.stack([observation.images for observation in observations]),
        proprio=np.stack([observation.proprio for observation in observations]),
        instructions=np.array([observation.instruction for observation in observations]),
        prepared=np.array([observation.prepared for observation in observations]),
    )


def read_observations(path: Path) -> list[Observation]:
    """What `write_observations` wrote. Raises BadInput when the file is broken."""
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = [file[name] for name in ("images", "proprio", "instructions", "prepared")]
        return [
            Observation(shown, state, str(text), bool(ready))
            for shown, state, text, ready in zip(*columns, strict=True)
        ]
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path}: holds no observations ({first_line(error)}): delete it") from error


def synthetic_observations(
    num_images: int, proprio: VectorStatistics | None, count: int = 8, seed: int = 0
) -> list[Observation]:
    """Smooth random images and states within the ranges of `proprio`: inputs where no stored ones are at hand."""
    random = np.random.default_rng(seed)
    observations = []
    for _ in range(count):
        coarse = random.integers(0, 256, (num_images, 8, 8, 3), dtype=np.uint8)
        state = np.zeros(0) if proprio is None else random.uniform(proprio.q01, proprio.q99)
        instruction = "pick up the black bowl and place it on the plate"
        observations.append(Observation(coarse.repeat(32, axis=1).repeat(32, axis=2), state, instruction))
    return observations
