"""One program at a time writes a run folder or a results file.

The lock is the kernel's (flock): it ends with the process that holds it, however that ends, so nothing that a kill
leaves behind stands in the way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from errors import BadInput

log = logging.getLogger(__name__)

RUN_LOCK = ".lock"  # in a run folder
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # a file system without them


class Lock:
    """Held from its making to `release`, or to the end of the process."""

    def __init__(self, path: Path, what: str):
        """Raises BadInput when another process holds it (`what` is locked), OSError when the file cannot be made."""
        self._file: IO[str] | None = path.open("a+")
        if not _take(self._file, fcntl.LOCK_EX):
            holder = _holder(self._file)
            self.release()
            raise BadInput(f"{what} is being written by {holder}: wait for its end, or stop it")
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def check_unlocked(path: Path, what: str) -> None:
    """Raise BadInput when a process holds the lock: found out before the seconds or minutes of a start."""
    try:
        file = path.open()
    except OSError:  # nobody has ever held it; whoever wants it next finds out what is wrong
        return
    with file:
        if not _take(file, fcntl.LOCK_SH):
            raise BadInput(f"{what} is being written by {_holder(file)}: wait for its end, or stop it")


@contextlib.contextmanager
def sole_writer(path: Path, what: str) -> Iterator[None]:
    """Within this block no other process that asks writes the file `path`. Raises BadInput when one does already."""
    beside = path.with_name(f".{path.name}.lock")
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(beside, what)
    except OSError as error:
        raise BadInput(f"{what}: cannot be written ({error.strerror or error})") from None
    try:
        yield
    finally:
        lock.release()


def _take(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning("%s: this file system has no locks; see to it that one program at a time writes there", file.name)
    return True


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read(200) or "another process"
