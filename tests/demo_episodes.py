"""Made-up demonstrations for tests: every frame looks different and has its own actions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from contracts import Observation
from envs.env import IMAGE_SIZE
from vla.images import encode_jpeg
from workshop.demo_files import CHUNK_LENGTH, DemoEpisode, episode_path, write_episode

FRAMES = 4
FRAME_GAP = 8  # env steps from frame to frame
INSTRUCTIONS = ("pick up the black bowl", "push the plate to the front of the stove")


def raw_images(episode: int, frames: int = FRAMES) -> np.ndarray:
    """Blurred noise as rendered, before JPEG: uint8 (F, 2, 256, 256, 3)."""
    noise = np.random.default_rng([episode, 1]).integers(0, 256, (frames, 2, 5, 5, 3), dtype=np.uint8)
    images = [
        Image.fromarray(image).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
        for image in noise.reshape(-1, 5, 5, 3)
    ]
    return np.stack([np.asarray(image) for image in images]).reshape(frames, 2, IMAGE_SIZE, IMAGE_SIZE, 3)


def make_episode(episode: int, instruction: str = INSTRUCTIONS[0]) -> DemoEpisode:
    rng = np.random.default_rng([episode, 2])
    env_steps = FRAMES * FRAME_GAP
    actions = rng.uniform(-0.9, 0.9, (env_steps + CHUNK_LENGTH, 7))
    actions[:, 6] = rng.choice([-1.0, 1.0], len(actions))
    return DemoEpisode(
        task_id=0,
        instruction=instruction,
        noise_scale=0.1,
        jpegs=[[encode_jpeg(image) for image in frame] for frame in raw_images(episode)],
        proprio=rng.normal(size=(FRAMES, 8)).astype(np.float32),
        frame_steps=FRAME_GAP * np.arange(FRAMES),
        actions=actions.astype(np.float32),
        env_steps=env_steps,
        looks="lowpoly",
    )


def write_demos(folder: Path, episodes: int = 2, instructions: int = 1) -> None:
    """Write episodes that take turns with the first `instructions` instructions."""
    for i in range(episodes):
        write_episode(episode_path(folder, 0, i), make_episode(i, INSTRUCTIONS[i % instructions]))


def observations_of(episodes: Sequence[DemoEpisode]) -> list[Observation]:
    """What a simulator would have given at the frames of the episodes 0, 1 and so on."""
    return [
        Observation(images, proprio.astype(np.float64), episode.instruction)
        for i, episode in enumerate(episodes)
        for images, proprio in zip(raw_images(i), episode.proprio, strict=True)
    ]
