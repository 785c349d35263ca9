"""What the rooms hand to one another: an observation, and the exceptions and files that they all speak of."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Observation:
    """What a policy decides on; on the CPU until the forward pass. Images are RGB, upright, agentview before wrist."""

    images: (
        np.ndarray
    )  # uint8 (num_images, 256, 256, 3); once `prepared`, (num_images, S, S, 3) as the network sees it
    # float64 (8,): eef position (m) 3, axis-angle (rad) 3, gripper joint positions (m) 2. Meta-World: (4,), 3 and 1.
    proprio: np.ndarray
    instruction: str
    prepared: bool = False
    state: np.ndarray | None = None  # float32 (D,): of the simulator, what a critic may know but no policy


class BadInput(Exception):
    """What the user can repair, in one line: what is wrong, what was found, what to do. Exit code 2."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # what libraries say may have several lines


class TimeIsUp(Exception):
    """A run has worked for its --max-hours: it is saved and goes on with --resume (exit code 0)."""


class SelfCheckError(RuntimeError):
    """The program found itself computing something else than it claims; its results would be wrong."""


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; its name when it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises BadInput when it is missing, damaged or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:  # broken JSON, or bytes that are no text
        raise BadInput(f"{path}: is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that readers see the old or the new content, never a part. Raises OSError."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        with temporary.open() as written:
            os.fsync(written.fileno())  # else a power cut may leave the new name on an empty file
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk its part would be in the way of what comes next
        raise


def resolve_pointer(path: Path) -> Path:
    """The folder beside it that the text file `checkpoints/best` or `latest` names; every other path as it is."""
    path = path.expanduser()
    if path.is_file() and path.stat().st_size < 100:
        name = path.read_bytes().decode(errors="replace").strip()
        if re.fullmatch(r"step_\d+", name):
            return path.with_name(name)
    return path
