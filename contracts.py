"""What all packages share: the observation, exceptions, JSON files, places to write, locks, pointers to checkpoints."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:  # importing it takes a tenth of a second
    from filelock import FileLock

T = TypeVar("T")

GIB = 2**30  # bytes
# Why a file cannot be written. Reading a file never fails for these reasons.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


@dataclass(frozen=True)
class Observation:
    """The input of one decision of a policy. Arrays stay on the CPU until the forward pass."""

    # uint8 RGB (num_images, 256, 256, 3), upright; first the agentview camera, then the wrist camera. If `prepared`,
    # (num_images, S, S, 3): resized and cropped, as the network sees them.
    images: np.ndarray
    # Proprioception, float64 (8,): end effector's position in metres (3), its axis-angle in radians (3), positions of
    # the gripper's joints in metres (2).
    proprio: np.ndarray
    instruction: str
    prepared: bool = False
    # float32 (D,), state of the simulator. Only a critic may read it, never a policy.
    state: np.ndarray | None = None


class BadInput(Exception):
    """A problem that the user can repair, in one line: what is wrong, what was found, what to do. Exit code 2."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # messages of libraries may have several lines


class TimeIsUp(Exception):
    """A run has reached its --max-hours. It is saved, and --resume continues it. Exit code 0."""


class SelfCheckError(RuntimeError):
    """An internal consistency check failed: results would be wrong. Exit code 1, with a traceback."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its class if it has no message."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def read_bytes(path: Path) -> bytes:
    """Read a small file. Raises BadInput if it is missing, or is git-lfs's pointer to the real one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror or error})") from None
    refuse_lfs_pointer(path)
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises BadInput if the file is missing, damaged, or holds no object."""
    try:
        value = json.loads(read_bytes(path).decode())
    except (ValueError, RecursionError) as error:  # broken JSON, or bytes that are not UTF-8 text
        raise BadInput(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def read_fields(path: Path, kind: type[T], advice: str = "", part: str | None = None) -> T:
    """Read a JSON file, or only its field `part`, as a dataclass or a dict type. Raises BadInput.

    Fields that `kind` does not have are ignored. advice: what the user can do about a wrong field.
    """
    value = read_json(path)
    text = json.dumps(value if part is None else value.get(part))
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        raise BadInput(f"{path}: {first_problem(error)}{advice and '; '}{advice}") from None


def first_problem(error: ValidationError) -> str:
    """The first wrong field, what is wrong with it and what it holds."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {first['msg']}, got {first['input']!r:.80}"


def refuse_lfs_pointer(path: Path) -> None:
    """Raise BadInput if git-lfs has left a text file that only names the real one."""
    is_small_file = path.is_file() and path.stat().st_size < 200
    if is_small_file and path.read_bytes().startswith(b"version https://git-lfs"):
        raise BadInput(f"{path}: is only git-lfs's pointer to the file: run `git lfs pull` in its folder")


@contextlib.contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Raise BadInput in place of anything that a library raises while this block reads the file `path`."""
    try:
        yield
    except Exception as error:  # torch and others raise a dozen kinds
        raise BadInput(f"{path} cannot be read ({first_line(error)}): copy or download it again") from error


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to write in this block, which then becomes `path`: readers see the old or the new content, never a part.

    Raises OSError, and then leaves the old content.
    """
    # On a disk that several machines share, processes may have the same id.
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        yield draft
        flush(draft)  # otherwise a power cut may leave the new name on an empty file
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)  # on a full disk the next file needs its space


def flush(path: Path) -> None:
    """Flush a file, or the list of files of a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file, as `replaced` does. Raises OSError."""
    with replaced(path) as draft:
        draft.write_text(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def output_place(out: Path, flag: str = "--out") -> Iterator[None]:
    """Write to `out`, which `flag` names, in this block. Raises BadInput, before the work, if nothing can be written.

    A disk that cannot be written later, in the block, is a BadInput, too. `out` need not exist yet.
    """
    is_tried = False
    existing = out  # for the message if the search itself fails, as it does for a name that is too long
    try:
        existing = next(folder for folder in (out, *out.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
        is_tried = True
        yield
    except OSError as error:
        if is_tried and error.errno not in DISK_ERRORS:
            raise
        place = error.filename if is_tried else existing
        advice = "free disk space, or name" if error.errno in DISK_ERRORS else "name"
        raise BadInput(
            f"{flag} {out}: {place or 'a file'} cannot be written ({error.strerror}): {advice} another place"
        ) from error


def lock_file(path: Path, subject: str) -> FileLock:
    """Lock the file `path`, in a folder that may not exist yet; `subject` is what it protects, for messages.

    The kernel ends the lock with the process; only on a disk without locks the file itself is one, which may stay
    behind. Raises BadInput if another program holds it, or if the file cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise BadInput(
            f"{subject} is being written by another program: wait until that ends, or stop it; if no machine runs it "
            f"any more, delete {path}"
        ) from None
    except OSError as error:
        raise BadInput(f"{subject}: cannot be written or locked ({error.strerror or error})") from None
    return lock


@contextlib.contextmanager
def locked(path: Path, subject: str) -> Iterator[None]:
    """Hold a lock during this block, as `lock_file` does, and delete its file at the end."""
    lock = lock_file(path, subject)
    try:
        yield
    finally:
        # Before the release: otherwise another program could lock a file that is then deleted.
        path.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def unfinished_folder(out: Path) -> Iterator[Path]:
    """A new folder OUT.unfinished, which becomes `out` after this block; if the block fails, it is removed.

    Raises BadInput as `output_place` does, if `out` exists, and if another program is writing it.
    """
    folder = out.parent / f"{out.name}.unfinished"
    with output_place(out), locked(out.parent / f".{out.name}.lock", f"--out {out}"):
        if out.exists():
            raise BadInput(f"--out {out} exists already: name a new folder")
        shutil.rmtree(folder, ignore_errors=True)  # what a kill has left
        folder.mkdir()
        try:
            yield folder
            folder.rename(out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def resolve_pointer(path: Path) -> Path:
    """The folder that a pointer (the text file `checkpoints/best` or `latest`) names; other paths are unchanged."""
    path = path.expanduser()
    if path.is_file() and path.stat().st_size < 100:
        name = path.read_bytes().decode(errors="replace").strip()
        if re.fullmatch(r"step_\d+", name):
            return path.with_name(name)
    return path
