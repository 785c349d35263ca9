"""The data of supervised training: demonstrations as what a policy sees and decides, and their statistics.

Images are uint8 after JPEG and Lanczos resize. Training crops and colours them at random (workshop/augment.py).
Held-out frames, and all frames without augmentation, get evaluation's centre crop: pixel by pixel what the policy will
see.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from contracts import BadInput, Observation, read_fields, write_json
from experiment.terminal import show_progress
from vla.adapter_folder import base_and_adapter
from vla.checkpoint import CheckpointInfo, inspect_checkpoint
from vla.dataset_statistics import STATISTICS_FILE, DatasetStatistics, load_statistics, normalise
from vla.hub import resolve_checkpoint
from vla.images import centre_crop, decode_jpeg, lanczos_resize
from vla.preprocessing import ImageProcessor
from vla.tokens import encode
from workshop.demo_files import KEY_SUFFIX, RECIPE_FILE, DemoEpisode, list_episodes, read_episode
from workshop.foreign_demos import find_demos, is_foreign, open_foreign
from workshop.sft_config import Flip, SftArgs
from workshop.tiny import make_tiny_checkpoint

Images = np.ndarray  # (F, n, 3, S, S) uint8, of the F frames of an episode: decoded and resized, not cropped
Episodes = list[tuple[DemoEpisode, Images]]
StatisticsEntry = dict[str, object]  # of one data set in dataset_statistics.json


@dataclass(frozen=True)
class Demos:
    """The demonstrations, and the checkpoint that is to learn them."""

    init: CheckpointInfo  # the checkpoint, with the statistics of the demonstrations
    unnorm_key: str  # of these statistics
    looks: list[str]  # of their pictures
    train: Episodes
    held_out: Episodes


def read_demos(args: SftArgs, scratch: Path) -> Demos:
    """Read all demonstrations, and find or make the checkpoint that training starts from. Raises BadInput.

    The folder `scratch` gets the demonstrations' statistics, and the random weights if training starts from such.
    """
    folders, unnorm_key = find_demo_folders(args.demos, args.task_suite)
    if args.init:
        if base_and_adapter(args.init)[1] is not None:
            raise BadInput(
                f"--init {args.init}: is an adapter: merge it first (python -m vla.merge), give the result"
            )
        checkpoint = resolve_checkpoint(args.init)
    else:
        checkpoint = make_tiny_checkpoint(
            scratch / "init",
            seed=args.seed,
            num_images=args.num_images or 2,
            proprio=args.proprio,
            l1_head=args.l1,
            size=args.size,
        )
    init = inspect_checkpoint(checkpoint, args.num_images)
    if args.l1 and init.action_head_file is None:
        raise BadInput(f"--l1: {checkpoint} has no action_head--*.pt: leave out --init or --l1")
    image_size = ImageProcessor.load(checkpoint).image_size
    episodes = read_episodes(folders, init.num_images, image_size, args.flip)
    demo_episodes = [episode for episode, _ in episodes]
    entry = dataset_statistics(demo_episodes)
    write_json(scratch / STATISTICS_FILE, {unnorm_key: entry})
    init = replace(init, statistics=load_statistics(scratch), statistics_folder=scratch)
    looks = sorted({episode.looks for episode in demo_episodes})
    train, held_out = split_episodes(episodes, args.holdout, args.seed)
    return Demos(init, unnorm_key, looks, train, held_out)


def find_demo_folders(demos: Sequence[str], task_suite: str | None) -> tuple[list[Path], str]:
    """The folders of the demonstrations, and the key of their statistics. Raises BadInput."""
    datasets = [find_demos(folder) for folder in demos]
    folders = [folder for folder, _ in datasets]
    keys = {key for _, key in datasets}
    check_same_simulator(folders)
    if task_suite:
        return folders, task_suite + KEY_SUFFIX
    if len(keys) > 1:
        names = ", ".join(sorted(keys))
        raise BadInput(f"--demos of several names ({names}): name their suite with --task-suite")
    return folders, keys.pop()


def check_same_simulator(folders: Sequence[Path]) -> None:
    """Raise BadInput if folders of workshop.demos were collected by other versions of the simulator's packages."""
    recipes = [folder / RECIPE_FILE for folder in folders if (folder / RECIPE_FILE).exists()]
    versions = [read_fields(recipe, dict[str, str], part="simulator") for recipe in recipes]
    for recipe, other in zip(recipes, versions, strict=True):
        if other != versions[0]:
            raise BadInput(
                f"--demos {recipes[0].parent} and {recipe.parent} are of different simulators, {versions[0]} and "
                f"{other}: collect one of them again"
            )


def read_episodes(folders: Sequence[Path], num_images: int, image_size: int, flip: Flip = "none") -> Episodes:
    """All episodes and their pictures, of our own or foreign folders; the JPEG files are not kept. Raises BadInput."""
    episodes = []
    for folder in folders:
        if is_foreign(folder):
            num_episodes, stored_episodes = open_foreign(folder, flip)
        else:
            paths = list_episodes(folder)
            num_episodes = len(paths)
            stored_episodes = ((str(path), read_episode(path)) for path in paths)
        with show_progress(f"reading {folder}", num_episodes, "episodes") as activity:
            for location, episode in stored_episodes:
                images = _read_images(location, episode, num_images, image_size)
                episodes.append((replace(episode, jpegs=[]), images))
                activity.advance(1)
    return episodes


def _read_images(location: str, episode: DemoEpisode, num_images: int, image_size: int) -> Images:
    num_cameras = len(episode.jpegs[0])
    if num_cameras < num_images:
        raise BadInput(f"{location}: {num_cameras} images a frame, --num-images {num_images} needs more")
    files = [jpeg for frame in episode.jpegs for jpeg in frame[:num_images]]
    try:
        with ThreadPoolExecutor() as pool:  # decoding and resizing release Python's lock
            images = np.stack(list(pool.map(_read_image, files, [image_size] * len(files))))
    except ValueError as fault:
        raise BadInput(f"{location}: no readable JPEG file: {fault}; collect it again") from fault
    return images.reshape(-1, num_images, *images.shape[1:])


def _read_image(jpeg: bytes, size: int) -> np.ndarray:
    """JPEG -> uint8 (3, size, size)."""
    planes = np.ascontiguousarray(decode_jpeg(jpeg).transpose(2, 0, 1))
    return lanczos_resize(planes, size)


def from_env(actions: np.ndarray) -> np.ndarray:
    """Actions (..., D) with the gripper as in data sets (1 = open, 0 = close), float64: undoes `vla.tokens.to_env`."""
    dataset_actions = np.array(actions, dtype=np.float64)
    dataset_actions[..., -1] = 1.0 - np.clip(dataset_actions[..., -1], 0.0, 1.0)
    return dataset_actions


def dataset_statistics(episodes: Sequence[DemoEpisode]) -> StatisticsEntry:
    """One entry of dataset_statistics.json, over all actions and states as openvla-oft computes it.

    The gripper, which is binary, is not scaled.
    """
    actions = from_env(np.concatenate([episode.actions for episode in episodes]))
    proprio = np.concatenate([episode.proprio for episode in episodes]).astype(np.float64)
    mask = [True] * (actions.shape[1] - 1) + [False]
    return {
        "num_transitions": len(actions),
        "num_trajectories": len(episodes),
        "action": _vector_statistics(actions) | {"mask": mask},
        "proprio": _vector_statistics(proprio),
    }


def _vector_statistics(values: np.ndarray) -> dict[str, list[float]]:
    return {
        "mean": values.mean(0).tolist(),
        "std": values.std(0).tolist(),
        "min": values.min(0).tolist(),
        "max": values.max(0).tolist(),
        "q01": np.quantile(values, 0.01, axis=0).tolist(),
        "q99": np.quantile(values, 0.99, axis=0).tolist(),
    }


def split_episodes(episodes: Episodes, holdout: float, seed: int) -> tuple[Episodes, Episodes]:
    """(to train on, held out): a random share of whole episodes. Raises BadInput when none is left to train on."""
    num_held_out = math.ceil(holdout * len(episodes))
    if num_held_out >= len(episodes):
        raise BadInput(f"--holdout {holdout} of {len(episodes)} episodes leaves none to train on")
    order = np.random.default_rng(seed).permutation(len(episodes))
    held_out = [episodes[i] for i in np.sort(order[:num_held_out])]
    train = [episodes[i] for i in np.sort(order[num_held_out:])]
    return train, held_out


def chunk_tokens(episodes: Episodes, statistics: DatasetStatistics) -> Tensor:
    """The token ids of every frame's chunk, (N, A) int64, time-major; `Policy.actions` is the inverse."""
    return torch.from_numpy(encode(chunk_actions(episodes, statistics).numpy())).flatten(1)


def chunk_actions(episodes: Episodes, statistics: DatasetStatistics) -> Tensor:
    """The normalised actions of every frame's chunk, (N, 8, 7) float64: what an L1 head learns to predict."""
    chunks = [episode.chunks() for episode, _ in episodes]
    return torch.from_numpy(normalise(from_env(np.concatenate(chunks)), statistics.action))


def make_observations(episodes: Episodes, cropped: bool = True) -> list[Observation]:
    """The frames as a policy gets them from a simulator's process; uncropped ones share the episodes' memory."""
    observations = []
    for episode, images in episodes:
        states = episode.proprio.astype(np.float64)
        for frame, state in zip(images, states, strict=True):
            planes = np.stack([centre_crop(image) for image in frame]) if cropped else frame  # (n, 3, S, S)
            pictures = np.moveaxis(planes, 1, -1)
            observations.append(Observation(pictures, state, episode.instruction, prepared=True))
    return observations
