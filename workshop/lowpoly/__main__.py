"""Draw the low-poly pack: models of LIBERO's objects and scenes with the official physics to the bit and simple looks.

`objects`, `rooms` and `textures` say what everything looks like, `shapes` makes the meshes, `facts` holds the physics,
and `mjcf` writes looks and physics as MJCF. After a change of any of them

    python -m workshop.lowpoly

writes the archive anew that envs/assets.py unpacks. Then give LOWPOLY_NAME there another number and rename the archive.
Otherwise caches keep the old pack, and resumed runs see other images than before.
"""

import argparse
import zipfile
from pathlib import Path

from envs.assets import LOWPOLY_ARCHIVE
from workshop.lowpoly.facts import AssetFile, Look, load_facts
from workshop.lowpoly.mjcf import asset_mjcf
from workshop.lowpoly.objects import object_look
from workshop.lowpoly.rooms import arena_look
from workshop.lowpoly.textures import TEXTURES, texture_png


def draw_pack() -> dict[str, bytes]:
    """All files of the pack: path in the asset folder -> content."""
    models = {file.path: asset_mjcf(file, look_of(file)).encode() for file in load_facts()}
    textures = {f"textures/{name}": texture_png(name) for name in TEXTURES}
    return models | textures


def write_archive(path: Path) -> None:
    """Write the pack as a zip file. It has neither times nor owners, so the same drawings make the same file."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in sorted(draw_pack().items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, compresslevel=9)


def look_of(file: AssetFile) -> Look:
    """The look of an asset file, which is a room or an object."""
    return arena_look(file) if file.is_arena else object_look(file)


if __name__ == "__main__":
    argparse.ArgumentParser("python -m workshop.lowpoly", description=__doc__.splitlines()[0]).parse_args()
    write_archive(LOWPOLY_ARCHIVE)
