"""What the policy reads of an observation, and a file format for a few of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from errors import BadInput
from untrusted.archives import read_npz


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
    arrays = read_npz(path, ("images", "proprio", "instructions", "prepared"))
    images, proprio = arrays["images"], arrays["proprio"]
    if images.dtype != np.uint8 or images.ndim != 5 or images.shape[-1] != 3 or not images.size:
        raise BadInput(f"{path} holds no observations (images are {images.dtype} {images.shape}): delete it")
    if proprio.dtype != np.float64 or proprio.ndim != 2 or not np.isfinite(proprio).all():
        raise BadInput(f"{path} holds no observations (proprio is {proprio.dtype} {proprio.shape}): delete it")
    try:
        rows = zip(images, proprio, arrays["instructions"], arrays["prepared"], strict=True)
        return [PlainObservation(shown, state, str(text), bool(ready)) for shown, state, text, ready in rows]
    except (TypeError, ValueError) as error:  # arrays of other lengths, or of none
        raise BadInput(f"{path} holds no observations ({error}): delete it") from error
