"""What the policy reads of an observation, and a file format for a few of them."""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from errors import BadInput


class Observation(Protocol):
    @property
    def images(self) -> np.ndarray:
        """uint8 (at least num_images, H, W, 3), RGB, upright; the first num_images are used"""

    @property
    def proprio(self) -> np.ndarray:
        """float64 (proprio_dim,), not normalised"""

    @property
    def instruction(self) -> str: ...

    @property
    def prepared(self) -> bool:
        """images are `Policy.prepare(frames)` already, uint8 (num_images, S, S, 3)"""


@dataclass(frozen=True)
class PlainObservation:
    """An observation that came from no simulator: made up for a probe, or read from a file."""

    images: np.ndarray
    proprio: np.ndarray
    instruction: str
    prepared: bool = False


def write_observations(path: Path, observations: Sequence[Observation]) -> None:
    """An .npz of uint8 images, proprio and instructions; all observations of one shape. No pickle."""
    np.savez_compressed(
        path,
        images=np.stack([observation.images for observation in observations]),
        proprio=np.stack([observation.proprio for observation in observations]),
        instructions=np.array([observation.instruction for observation in observations]),
        prepared=np.array([observation.prepared for observation in observations]),
    )


def read_observations(path: Path) -> list[PlainObservation]:
    """What `write_observations` wrote. Raises BadInput when the file is broken."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = ("images", "proprio", "instructions", "prepared")
            rows = zip(*(arrays[name] for name in names), strict=True)
            return [PlainObservation(images, proprio, str(text), bool(ready)) for images, proprio, text, ready in rows]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path} holds no observations ({error}): delete it") from error
