"""A disk that does not take what a run wants to keep: full, read-only, gone. One sentence each."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

GIB = 2**30
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DISK_FAILS = {errno.EROFS, errno.EIO, errno.ESTALE}
REFUSED = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM}  # elsewhere than in the run folder: perhaps a bug


def check_room(folder: Path, wanted_bytes: int, what: str) -> None:
    """Raise OSError (ENOSPC) when `what` will not fit on the disk of `folder`, before anything of it is written."""
    free = shutil.disk_usage(folder).free
    if free < wanted_bytes:
        raise OSError(errno.ENOSPC, f"{what} needs {wanted_bytes / GIB:.2f} GiB", str(folder))


def disk_problem(error: OSError, run_folder: Path) -> str | None:
    """What the user can do about an error while a run writes, in one line; None when no disk is to blame."""
    path = Path(error.filename) if isinstance(error.filename, str) else run_folder
    is_ours = path.is_relative_to(run_folder)
    if error.errno not in NO_ROOM | DISK_FAILS | (REFUSED if is_ours else set()):
        return None
    if is_ours and not os.path.isdir(run_folder):
        return (
            f"the run folder {run_folder} is gone: it was moved or deleted while the run was writing to it, so the run "
            "stopped; --resume goes on from where it lies now"
        )
    is_saved = os.path.exists(run_folder / "checkpoints" / "latest")
    then = "the newest checkpoint is whole, --resume goes on from it" if is_saved else "nothing was saved yet"
    reason = error.strerror or os.strerror(error.errno)
    if error.errno in NO_ROOM:
        free = shutil.disk_usage(run_folder).free / GIB
        return f"no room for {path} ({reason}; {free:.2f} GiB are free): make room, lower --keep-checkpoints; {then}"
    return f"{path} cannot be written ({reason}): see to its disk and permissions; {then}"


def write_all(descriptor: int, data: bytes) -> None:
    """Write `data` and flush it to the disk; what fails raises OSError now, and nothing waits in a buffer."""
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)
