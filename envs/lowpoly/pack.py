"""Writes the pack: a folder that LIBERO takes as its asset folder."""

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

from envs.lowpoly.facts import FACTS_FILE, load_facts
from envs.lowpoly.looks import look_of
from envs.lowpoly.mjcf import asset_mjcf
from envs.lowpoly.textures import TEXTURES, texture_png
from errors import BadInput


@cache
def pack_name() -> str:
    """Name of the pack's folder, for records too: it changes with the generator's code and with the facts."""
    digest = hashlib.sha256()
    for source in [*sorted(FACTS_FILE.parent.glob("*.py")), FACTS_FILE]:
        digest.update(source.read_bytes())
    return f"lowpoly-{digest.hexdigest()[:12]}"


def ensure_pack(cache_dir: Path) -> Path:
    """The absolute path of the pack below `cache_dir`, written first if it is not there (a second).

    It appears at once and whole (a temporary folder is renamed), so that several processes may ask at the same time.
    Raises BadInput if the folder cannot be written.
    """
    folder = Path(cache_dir).absolute() / pack_name()
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{pack_name()}-", dir=folder.parent) as unfinished:
            whole = Path(unfinished) / pack_name()  # inside, because a temporary folder itself is closed to other users
            write_pack(whole)
            os.rename(whole, folder)
    except OSError as fault:
        if not folder.is_dir():  # else another process was first
            raise BadInput(
                f"the low-poly models need 5 MB in {folder.parent}, which cannot be written: {fault.strerror}; "
                "name another folder in the environment variable VLA_GRPO_CACHE"
            ) from fault
    return folder


def write_pack(folder: Path) -> None:
    """Writes the pack's files into a folder."""
    for file in load_facts():
        _write(folder / file.path, asset_mjcf(file, look_of(file)).encode())
    for name in TEXTURES:
        _write(folder / "textures" / name, texture_png(name))


def _write(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
