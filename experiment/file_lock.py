"""Lock a run folder or a results file, so that only one program at a time writes it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from contracts import BadInput


def lock_file(path: Path, subject: str) -> FileLock:
    """Lock the file `path`, in a folder that may not exist yet; `subject` is what it protects, for messages.

    The kernel ends the lock with the process; only on a disk without locks the file itself is one, which may stay
    behind. Raises BadInput if another program holds it, or if the file cannot be written.
    """
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
