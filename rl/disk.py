"""A disk that does not take what a run wants to keep: full, read-only, gone. One sentence each."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

GIB = 2**30
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FAULTS = NO_ROOM | {
    errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ESTALE, errno.ENODEV,
    errno.ENOTCONN,
}  # fmt: skip


def check_room(folder: Path, wanted_bytes: int, what: str) -> None:
    """Raise OSError (ENOSPC) when `what` will not fit on the disk of `folder`, before anything of it is written."""
    free = shutil.disk_usage(folder).free
    if free < wanted_bytes:
        raise OSError(errno.ENOSPC, f"{what} needs {wanted_bytes / GIB:.2f} GiB", str(folder))


def disk_problem(error: OSError, run_folder: Path) -> str | None:
    """What the user can do about an error in a run folder, in one line; None when the disk is not to blame."""
    if error.errno not in FAULTS:
        return None
    if not run_folder.is_dir():
        return (
            f"the run folder {run_folder} is gone: it was moved or deleted while the run was writing to it, so the run "
            "stopped; --resume goes on from where it lies now"
        )
    reason = error.strerror or os.strerror(error.errno)
    path = Path(error.filename) if isinstance(error.filename, str) else run_folder
    is_saved = (run_folder / "checkpoints" / "latest").exists()
    then = "the newest checkpoint is whole, --resume goes on from it" if is_saved else "nothing was saved yet"
    if error.errno in NO_ROOM:
        free = shutil.disk_usage(run_folder).free / GIB
        return f"no room for {path} ({reason}; {free:.2f} GiB are free): make room, lower --keep-checkpoints; {then}"
    return f"{path} cannot be written ({reason}): make it writable again; {then}"


def write_all(descriptor: int, data: bytes) -> None:
    """Write `data` and flush it to the disk; what fails raises OSError now, and nothing waits in a buffer."""
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)
