"""Lock a run folder or a results file, so that only one program at a time writes it."""

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from contracts import BadInput

# What flock raises on a disk without it: Lustre mounted without `-o flock`, NFS without a lock service.
NO_FLOCK = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


class FileLock:
    """A lock that this process holds. Its file names the process and the machine, in a line each."""

    def __init__(self, path: Path, file: IO[bytes]):
        self._path = path
        self._file = file
        try:
            file.truncate(0)
            file.write(f"{os.getpid()}\n{socket.gethostname()}\n".encode())
        except OSError:
            self.close()  # a full disk has room for an empty file, which would stay
            raise

    def close(self) -> None:
        """Delete the file, then unlock: in the other order another process could lock a file that is then deleted."""
        if not self._file.closed:
            with contextlib.suppress(OSError):  # the folder was deleted, or can no longer be written
                self._path.unlink()
            self._file.close()


def lock_file(path: Path, subject: str) -> FileLock:
    """Lock the file `path`, in a folder that may not exist yet; `subject` is what it protects, for messages.

    With flock the kernel holds the lock, which ends with the process. On a disk without flock the file is the lock as
    long as it exists. Raises BadInput if another program holds the lock, or if the file cannot be written.
    """
    advice = "wait until that ends, or stop it"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file, is_new = _open(path)
            owner = file.read().decode(errors="replace").split()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                is_ours = is_new or _has_ended(owner)
                if not is_ours:
                    advice += f"; if it has ended (its disk has no flock, which would tell), delete {path}"
                    raise BlockingIOError from None
            if is_ours:
                return FileLock(path, file)
    except BlockingIOError:
        program = f"process {owner[0]} on {owner[1]}" if len(owner) == 2 else "unknown process"
        raise BadInput(f"{subject} is being written by another program ({program}): {advice}") from None
    except OSError as error:
        raise BadInput(f"{subject}: cannot be written ({error.strerror or error})") from None


def _open(path: Path) -> tuple[IO[bytes], bool]:
    """Open the file at its beginning. Returns it, and whether it is new."""
    try:
        return path.open("xb+", buffering=0), True
    except FileExistsError:
        file = path.open("ab+", buffering=0)
        file.seek(0)
        return file, False


def _has_ended(owner: list[str]) -> bool:
    """Whether the owner was a process of this machine and has ended, perhaps without its parent having asked for it."""
    if len(owner) != 2 or owner[1] != socket.gethostname():
        return False
    # A container that is started again may have the same name and give this process the same number.
    command_line = Path("/proc", owner[0], "cmdline")
    return owner[0] == str(os.getpid()) or not command_line.exists() or command_line.read_bytes() == b""
