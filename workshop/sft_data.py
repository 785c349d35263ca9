"""Demonstrations as what a policy sees and says: observations, tokens, their statistics; augmentation of pictures.

Images are uint8 after JPEG and Lanczos resize. Training crops and colours them at random (`augment`); held-out frames,
and all without augmentation, get evaluation's centre crop: pixel by pixel what the policy will see.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from contracts import BadInput, Observation
from experiment.terminal import progress_bar
from vla.dataset_statistics import DatasetStatistics, normalise
from vla.images import CROP_AREA, centre_crop, lanczos_resize
from vla.tokens import encode
from workshop.demo_files import CHUNK_LENGTH, DemoEpisode, decode_jpeg, list_episodes, read_episode
from workshop.foreign_demos import Flip, is_foreign, open_foreign

CROP_SIDE = CROP_AREA**0.5  # of the image's side
T = TypeVar("T")


Images = np.ndarray  # (F, n, 3, S, S) uint8, of the F frames of an episode: decoded and resized, not cropped
Episodes = list[tuple[DemoEpisode, Images]]


def read_episodes(folders: Sequence[Path], num_images: int, image_size: int, flip: Flip = "none") -> Episodes:
    """All episodes and their pictures, read one after the other; the files of the pictures are not kept.

    Folders are our own or foreign (see workshop/foreign_demos.py, and there for `flip`). Raises BadInput.
    """
    found = []
    with ThreadPoolExecutor() as pool:  # decoding and resizing let go of Python's lock
        for folder in folders:
            if is_foreign(folder):
                number, episodes = open_foreign(folder, flip)
            else:
                paths = list_episodes(folder)
                number, episodes = len(paths), ((str(path), read_episode(path)) for path in paths)
            with progress_bar(f"reading {folder}", number) as on_episodes:
                for where, episode in episodes:
                    images = _images(where, episode, num_images, image_size, pool)
                    found.append((replace(episode, jpegs=[[]] * len(images)), images))
                    on_episodes(1)
    return found


def _images(
    where: str, episode: DemoEpisode, num_images: int, image_size: int, pool: ThreadPoolExecutor
) -> Images:
    if (cameras := len(episode.jpegs[0])) < num_images:
        raise BadInput(f"{where}: {cameras} images per frame, --num-images {num_images} needs more")
    files = [jpeg for frame in episode.jpegs for jpeg in frame[:num_images]]
    try:
        images = np.stack(list(pool.map(_resized, files, [image_size] * len(files))))
    except ValueError as fault:
        raise BadInput(f"{where}: no readable JPEG file: {fault}; collect it again") from fault
    return images.reshape(-1, num_images, *images.shape[1:])


def _resized(jpeg: bytes, size: int) -> np.ndarray:
    """uint8 (3, S, S)"""
    return lanczos_resize(np.ascontiguousarray(decode_jpeg(jpeg).transpose(2, 0, 1)), size)


def from_env(actions: np.ndarray) -> np.ndarray:
    """The inverse of `to_env`: gripper (..., 6) from -1 = open, +1 = close to 1 = open, 0 = close, nothing beyond."""
    dataset_actions = np.array(actions, dtype=np.float64)
    dataset_actions[..., -1] = 1.0 - np.clip(dataset_actions[..., -1], 0.0, 1.0)
    return dataset_actions


def dataset_statistics(episodes: Sequence[DemoEpisode], binary_gripper: bool = True) -> dict[str, Any]:
    """One entry of dataset_statistics.json, computed as openvla-oft does: over all actions, gripper not scaled.

    A gripper that is not binary, but an effort, is an action dimension like the others.
    """
    actions = np.concatenate([episode.actions for episode in episodes]).astype(np.float64)
    actions = from_env(actions) if binary_gripper else actions
    proprio = np.concatenate([episode.proprio for episode in episodes]).astype(np.float64)
    entry: dict[str, Any] = {"num_transitions": len(actions), "num_trajectories": len(episodes)}
    for name, values in (("action", actions), ("proprio", proprio)):
        q01, q99 = np.quantile(values, [0.01, 0.99], axis=0)
        rows = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
        entry[name] = {row: numbers.tolist() for row, numbers in (rows | {"q01": q01, "q99": q99}).items()}
    entry["action"]["mask"] = [True] * (actions.shape[1] - 1) + [not binary_gripper]
    return entry


def split_episodes(episodes: Sequence[T], holdout: float, seed: int) -> tuple[list[T], list[T]]:
    """(to train on, held out), a random share of whole episodes. Raises BadInput when none is left to train on."""
    num_held_out = math.ceil(holdout * len(episodes))
    if num_held_out == len(episodes):
        raise BadInput(
            f"--holdout {holdout} of {len(episodes)} episodes leaves none to train on: collect more"
        )
    order = np.random.default_rng(seed).permutation(len(episodes))
    held_out, train = ([episodes[i] for i in np.sort(part)] for part in np.split(order, [num_held_out]))
    return train, held_out


def chunk_tokens(episodes: Episodes, statistics: DatasetStatistics) -> Tensor:
    """The token ids of every frame's chunk, (N, A) int64, time-major; `Policy.actions` undoes it."""
    chunks = np.concatenate(
        [e.actions[e.frame_steps[:, None] + np.arange(CHUNK_LENGTH)] for e, _ in episodes]
    )
    actions = chunks if statistics.action.mask[-1] else from_env(chunks)  # (N, 8, 7 or 4)
    return torch.from_numpy(encode(normalise(actions, statistics.action))).flatten(1)


def make_observations(episodes: Episodes, cropped: bool = True) -> list[Observation]:
    """The frames as a policy gets them from a simulator's process; uncropped ones share the episodes' memory."""
    observations = []
    for episode, images in episodes:
        for frame, state in zip(images, episode.proprio.astype(np.float64), strict=True):
            planes = np.stack([centre_crop(image) for image in frame]) if cropped else frame  # (n, 3, S, S)
            observations.append(
                Observation(np.moveaxis(planes, 1, -1), state, episode.instruction, prepared=True)
            )
    return observations


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Crop, then change brightness, contrast, saturation and hue, limiting values to [0, 1] after each.

    uint8 (N, 3, S, S) -> uint8 of the same shape; every image draws for itself. `generator` is one of their device.
    Source: openvla-oft @213c5ff, prismatic/vla/datasets/datasets.py, for the ranges; kvablack/dlimp @a36e167,
    dlimp/augmentations.py, for the order and the conversions. There, all draws of an image come from one seed, so that
    crops move along the diagonal only and the colours change together; here they are independent.
    """
    draws = torch.rand(len(images), 6, device=images.device, generator=generator)
    lows, highs = torch.tensor(
        [[0, 0, -0.2, 0.8, 0.8, -0.05], [1, 1, 0.2, 1.2, 1.2, 0.05]], device=images.device
    )
    offsets, *colours = (lows + (highs - lows) * draws).split([2, 1, 1, 1, 1], dim=1)
    brightness, contrast, saturation, hue = (factors[..., None, None] for factors in colours)  # (N, 1, 1, 1)
    values = crop(images.float() / 255, (1 - CROP_SIDE) * offsets).clamp(0, 1)
    values = (values + brightness).clamp(0, 1)
    mean = values.mean(dim=(2, 3), keepdim=True)
    values = (mean + contrast * (values - mean)).clamp(0, 1)
    return to_levels(adjust_colours(values, saturation, hue))


def crop(values: Tensor, offsets: Tensor) -> Tensor:
    """A square of 90 % of the area, enlarged to the old size bilinearly; corners of the box map to corners.

    values: float32 (N, 3, S, S). offsets: (N, 2), top and left edge of the box as shares of the side, from 0 to
    1 - CROP_SIDE.
    """
    # grid_sample counts from -1 to 1 and wants (x, y): output u in [-1, 1] lies at CROP_SIDE * u + shift.
    shift = (2 * offsets + CROP_SIDE - 1).flip(1)  # (N, 2)
    scale = CROP_SIDE * torch.eye(2, device=values.device).expand(len(values), 2, 2)
    grid = F.affine_grid(torch.cat([scale, shift[..., None]], dim=-1), list(values.shape), align_corners=True)
    return F.grid_sample(values, grid, mode="bilinear", padding_mode="border", align_corners=True)


def adjust_colours(values: Tensor, saturation: Tensor, hue: Tensor) -> Tensor:
    """Multiply the saturation of HSV (up to 1) and turn the hue, keeping HSV's value.

    values: float32 (N, 3, S, S) in [0, 1]; saturation: factors (N, 1, 1, 1); hue: (N, 1, 1, 1), of the full circle.
    """
    red, green, blue = values.split(1, dim=1)
    value = values.amax(1, keepdim=True)
    chroma = value - values.amin(1, keepdim=True)
    divisor = torch.where(chroma > 0, chroma, 1.0)
    sextant = torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    sextant = torch.where(value == red, (green - blue) / divisor, sextant)  # hue in sixths of the circle
    chroma = torch.minimum(saturation * chroma, value)  # chroma = saturation * value
    # Each channel is a trapezoid over the hue: 0 for one third of the circle, `chroma` below `value` for another.
    places = [torch.remainder(sextant + 6 * hue + start, 6) for start in (5.0, 3.0, 1.0)]
    return torch.cat([value - chroma * torch.minimum(p, 4 - p).clamp(0, 1) for p in places], dim=1)


def to_levels(values: Tensor) -> Tensor:
    """[0, 1] -> uint8 by floor(255.5 x), which is TensorFlow's conversion and that of `centre_crop`."""
    return (values.clamp(0, 1) * 255.5).to(torch.uint8)
