"""Write the low-poly pack: models of LIBERO's objects and scenes with the official physics to the bit and simple looks.

Nothing is downloaded. `objects`, `rooms` and `textures` say what everything looks like, `shapes` makes the meshes,
`facts` holds the physics, and `mjcf` writes looks and physics as MJCF. This file writes all of it into a folder that
LIBERO can use as its asset folder: the pack.
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
# whenever anything is drawn differently. Otherwise caches keep the old pack, and resumed runs see other images than
# before. `test_the_pack_is_drawn_as_its_name_promises` fails if you forget it.
PACK_NAME = "lowpoly-e981a0a7b12e"


def ensure_pack(cache_dir: Path) -> Path:
    """The absolute path of the pack below `cache_dir`; writes the pack first if it does not exist (takes a second).

    The folder is complete as soon as it exists, so several processes may call this at the same time. Raises BadInput if
    it cannot be written.
    """
    folder = Path(cache_dir).absolute() / PACK_NAME
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{PACK_NAME}-", dir=folder.parent) as unfinished:
            # Write into a subfolder, because other users may not read the temporary folder itself.
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
    """Write all files of the pack into a folder."""
    for file in load_facts():
        _write(folder / file.path, asset_mjcf(file, look_of(file)).encode())
    for name in TEXTURES:
        _write(folder / "textures" / name, texture_png(name))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def look_of(file: AssetFile) -> Look:
    """The look of an asset file, which is a room or an object."""
    return arena_look(file) if file.is_arena else object_look(file)
