"""Demonstrations as tensors: everything that training reads is computed once and kept on the device.

Images are kept as uint8 after JPEG and Lanczos resize. Training then cuts out and colours them at random. Where it does
not, and for held-out frames, they get evaluation's centre crop here: pixel by pixel what the policy will see.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from demonstrations import CHUNK_LENGTH, decode_jpeg, list_episodes, read_episode
from errors import BadInput
from vla.preprocessing import ImageProcessor
from vla.prompt import PAD_ID, prompt_ids
from vla.resampling import centre_crop, lanczos_resize
from vla.tokens import FIRST_ACTION_TOKEN, DatasetStatistics, encode, normalise, normalise_proprio


@dataclass(frozen=True)
class EpisodeArrays:
    """What is left of an episode file when its images are decoded and resized. F frames, n images each."""

    instruction: str
    images: np.ndarray  # (F, n, 3, S, S) uint8, not cropped
    proprio: np.ndarray  # (F, 8) float32
    chunks: np.ndarray  # (F, 8, 7) float64, in the data set's units: gripper 1 open, 0 close
    actions: np.ndarray  # (T, 7) float64, likewise
    objects: np.ndarray  # (F, 6) float32, metres


@dataclass(frozen=True)
class Prompts:
    """The different instructions of the data, as ids."""

    ids: Tensor  # (I, P) int64, padded on the right
    lengths: Tensor | None  # (I,) int64; None where all are equal: then attention needs no mask

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.ids[index], None if self.lengths is None else self.lengths[index]


@dataclass(frozen=True)
class Frames:
    """N frames and their targets, on one device."""

    images: Tensor  # (N, n, 3, S, S) uint8
    proprio: Tensor  # (N, 8) float32, normalised
    prompt: Tensor  # (N,) int64, row of Prompts
    targets: Tensor  # (N, A) int64 in 0..255: action token minus 31744, time-major
    objects: Tensor  # (N, 6) float32, of mean 0 and standard deviation 1 over the data

    def __post_init__(self) -> None:
        lengths = {len(values) for values in vars(self).values()}
        if len(lengths) != 1:
            raise ValueError(f"fields of {sorted(lengths)} frames")

    def __len__(self) -> int:
        return len(self.targets)

    def rows(self, index: Tensor | slice) -> "Frames":
        return Frames(**{name: values[index] for name, values in vars(self).items()})


@dataclass(frozen=True)
class SftData:
    train: Frames
    held_out: Frames | None  # of other episodes; images cropped in the middle
    prompts: Prompts


def read_episodes(folders: Sequence[Path], num_images: int, image_size: int, workers: int) -> list[EpisodeArrays]:
    """All episodes of the folders in the order of their names. Decoding and resizing let go of Python's lock, so that
    threads are enough."""
    paths = [path for folder in folders for path in list_episodes(folder)]
    with ThreadPoolExecutor(workers) as pool:  # decoding and resizing let go of Python's lock
        return list(pool.map(partial(_read_episode, num_images=num_images, image_size=image_size), paths))


def _read_episode(path: Path, num_images: int, image_size: int) -> EpisodeArrays:
    episode = read_episode(path)
    if len(episode.jpegs[0]) < num_images:
        raise BadInput(f"{path}: {len(episode.jpegs[0])} images per frame, --num-images {num_images} needs more")
    images = np.empty((len(episode.jpegs), num_images, 3, image_size, image_size), dtype=np.uint8)
    for frame, jpegs in enumerate(episode.jpegs):
        for camera, jpeg in enumerate(jpegs[:num_images]):
            try:
                planes = np.ascontiguousarray(decode_jpeg(jpeg).transpose(2, 0, 1))
            except BadInput as problem:
                raise BadInput(f"{path}: {problem}") from problem
            images[frame, camera] = lanczos_resize(planes, image_size)
    actions = from_env(episode.actions)
    windows = episode.frame_steps[:, None] + np.arange(CHUNK_LENGTH)
    return EpisodeArrays(episode.instruction, images, episode.proprio, actions[windows], actions, episode.objects)


def from_env(actions: np.ndarray) -> np.ndarray:
    """The inverse of `vla.action_tokenizer.to_env`: gripper from -1 = open, +1 = close to 1 = open, 0 = close.

    actions: (..., 7) in env units. As in the published data sets, commands in between are limited to [0, 1].
    """
    dataset_actions = np.array(actions, dtype=np.float64)
    dataset_actions[..., -1] = 1.0 - np.clip(dataset_actions[..., -1], 0.0, 1.0)
    return dataset_actions


def dataset_statistics(episodes: Sequence[EpisodeArrays]) -> dict[str, Any]:
    """One entry of dataset_statistics.json, computed as openvla-oft does: over all actions, gripper not scaled."""
    actions = np.concatenate([episode.actions for episode in episodes])
    proprio = np.concatenate([episode.proprio for episode in episodes])
    mask = [True] * (actions.shape[1] - 1) + [False]
    return {
        "action": _vector_statistics(actions) | {"mask": mask},
        "proprio": _vector_statistics(proprio.astype(np.float64)),
        "num_transitions": len(actions),
        "num_trajectories": len(episodes),
    }


def _vector_statistics(values: np.ndarray) -> dict[str, list[float]]:
    """Of (N, D) vectors, each a list of D numbers."""
    q01, q99 = np.quantile(values, [0.01, 0.99], axis=0)
    rows = {"mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0)}
    return {name: row.tolist() for name, row in (rows | {"q01": q01, "q99": q99}).items()}


def split_episodes(
    episodes: Sequence[EpisodeArrays], holdout: float, seed: int
) -> tuple[list[EpisodeArrays], list[EpisodeArrays]]:
    """(to train on, held out), a random share of whole episodes. Raises BadInput when none is left to train on."""
    num_held_out = math.ceil(holdout * len(episodes))
    if num_held_out == len(episodes):
        raise BadInput(f"--holdout {holdout} of {len(episodes)} episodes leaves none to train on: collect more")
    order = np.random.default_rng(seed).permutation(len(episodes))
    held_out, train = ([episodes[i] for i in np.sort(part)] for part in np.split(order, [num_held_out]))
    return train, held_out


def make_data(
    train: Sequence[EpisodeArrays],
    held_out: Sequence[EpisodeArrays],
    statistics: DatasetStatistics,
    tokenizer: Tokenizer,
    device: torch.device,
    augment: bool,
) -> SftData:
    """Encode and move to the device. augment: training frames stay whole, to be cropped at random."""
    episodes = [*train, *held_out]
    instructions = sorted({episode.instruction for episode in episodes})
    objects = np.concatenate([episode.objects for episode in episodes])
    scale = objects.mean(0), np.maximum(objects.std(0), 1e-3)  # what never moves must not become noise
    frames = partial(_frames, statistics=statistics, instructions=instructions, objects_scale=scale, device=device)
    return SftData(
        train=frames(train if augment else _centre_cropped(train)),
        held_out=frames(_centre_cropped(held_out)) if held_out else None,
        prompts=make_prompts(tokenizer, instructions, device),
    )


def make_prompts(tokenizer: Tokenizer, instructions: Sequence[str], device: torch.device) -> Prompts:
    ids = [torch.tensor(prompt_ids(tokenizer, instruction)) for instruction in instructions]
    lengths = torch.tensor([len(row) for row in ids], device=device)
    padded = len({len(row) for row in ids}) > 1
    return Prompts(pad_sequence(ids, batch_first=True, padding_value=PAD_ID).to(device), lengths if padded else None)


def _centre_cropped(episodes: Sequence[EpisodeArrays]) -> list[EpisodeArrays]:
    return [
        replace(episode, images=np.stack([[centre_crop(planes) for planes in frame] for frame in episode.images]))
        for episode in episodes
    ]


def _frames(
    episodes: Sequence[EpisodeArrays],
    statistics: DatasetStatistics,
    instructions: Sequence[str],
    objects_scale: tuple[np.ndarray, np.ndarray],
    device: torch.device,
) -> Frames:
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(episode, name) for episode in episodes])

    mean, std = objects_scale
    prompt = np.repeat([instructions.index(e.instruction) for e in episodes], [len(e.images) for e in episodes])
    tokens = encode(normalise(joined("chunks"), statistics.action))
    assert statistics.proprio is not None, "`dataset_statistics` has them"
    proprio = normalise_proprio(joined("proprio"), statistics.proprio)
    return Frames(
        images=torch.from_numpy(joined("images")).to(device),
        proprio=torch.from_numpy(proprio).to(device, torch.float32),
        prompt=torch.from_numpy(prompt).to(device),
        targets=torch.from_numpy(tokens - FIRST_ACTION_TOKEN).flatten(1).to(device),
        objects=torch.from_numpy((joined("objects") - mean) / std).to(device, torch.float32),
    )


@dataclass(frozen=True)
class PixelScale:
    """The image processor's constants on the device."""

    mean: Tensor  # (2, 3, 1, 1) float32: DINOv2, SigLIP
    std: Tensor  # (2, 3, 1, 1)

    @classmethod
    def of(cls, processor: ImageProcessor, device: torch.device) -> "PixelScale":
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=device)[..., None, None]
            for values in (processor.means, processor.stds)
        )
        return cls(mean, std)

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (B, n, 3, S, S) -> float32 (B, 6n, S, S), as `vla.preprocessing.pixel_values` does."""
        levels = images[:, :, None].float() / 255  # (B, n, 1, 3, S, S)
        return ((levels - self.mean) / self.std).flatten(1, 3)
