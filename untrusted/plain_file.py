"""The bytes of a file that somebody else may have made: no pipe to wait for, no device that never ends, no giant."""

import stat
from pathlib import Path

from errors import BadInput

MAX_BYTES = 100_000_000  # of a file that is read as a whole; tokenizers and long runs' records have some MB


def check_plain(path: Path) -> int:
    """Size of a file in bytes. Raises BadInput when it is missing, a folder, a pipe or a device."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise BadInput(f"{path}: cannot be read ({reason(error)})") from error
    if not stat.S_ISREG(found.st_mode):
        raise BadInput(f"{path}: cannot be read (it is no plain file)")
    return found.st_size


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a plain file. Raises BadInput, also for more than `most` bytes."""
    check_plain(path)
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({reason(error)})") from error
    if len(content) > most:
        raise BadInput(f"{path}: cannot be read (it has more than {most:,} bytes)")
    return content


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The same as text, line ends as Python's text files give them. Raises BadInput, also for other than UTF-8."""
    try:
        text = read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is no text in UTF-8 (byte {error.start})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def reason(error: Exception) -> str:
    """Why the system refused, without the path that its message repeats."""
    return getattr(error, "strerror", None) or str(error)
