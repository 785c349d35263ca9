"""Low-poly models of LIBERO's objects and scenes: the official physics to the bit, simple looks, no download.

`objects`, `rooms` and `textures` say what everything looks like, `shapes` makes the meshes, `facts` holds the physics,
and `mjcf` writes looks and physics into MJCF files. This file puts those into a folder that LIBERO takes as its asset
folder: the pack.
"""

import os
import tempfile
from pathlib import Path

from contracts import BadInput
from envs.lowpoly.facts import AssetFile, Look, load_facts
from envs.lowpoly.mjcf import asset_mjcf
from envs.lowpoly.objects import object_look
from envs.lowpoly.rooms import arena_look
from envs.lowpoly.textures import TEXTURES, texture_png

# The name of the pack's folder; its last 8 digits identify these looks in the records of runs. Change the number
# whenever something else is drawn: otherwise caches keep the old pack, and runs go on with other pictures than they
# began with. `test_the_pack_is_drawn_as_its_name_promises` fails if that was forgotten.
PACK_NAME = "lowpoly-e981a0a7b12e"


def ensure_pack(cache_dir: Path) -> Path:
    """The absolute path of the pack below `cache_dir`, written first if it is not there (a second).

    The folder appears at once and whole, so several processes may ask at the same time. Raises BadInput.
    """
    folder = Path(cache_dir).absolute() / PACK_NAME
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{PACK_NAME}-", dir=folder.parent) as unfinished:
            # Write into a folder inside: the temporary folder itself is closed to other users.
            complete = Path(unfinished) / PACK_NAME
            write_pack(complete)
            os.rename(complete, folder)
    except OSError as fault:
        was_written_by_another = folder.is_dir()
        if not was_written_by_another:
            raise BadInput(
                f"the low-poly models need 5 MB in {folder.parent}, which cannot be written: {fault.strerror}; "
                "name another folder in the environment variable VLA_GRPO_CACHE"
            ) from fault
    return folder


def write_pack(folder: Path) -> None:
    """Write the pack's files into a folder."""
    for file in load_facts():
        _write(folder / file.path, asset_mjcf(file, look_of(file)).encode())
    for name in TEXTURES:
        _write(folder / "textures" / name, texture_png(name))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def look_of(file: AssetFile) -> Look:
    return arena_look(file) if file.is_arena else object_look(file)
