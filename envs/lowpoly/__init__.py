"""Low-poly models of LIBERO's objects and scenes: the official physics to the bit, simple looks, no download.

Where to find what: `objects` and `rooms` say what everything looks like, `shapes` makes the meshes, `facts` holds the
physics. This file writes both into MJCF, and those files into a folder that LIBERO takes as its asset folder.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np

from contracts import BadInput
from envs.lowpoly.facts import AssetFile, Attributes, Body, Look, load_facts
from envs.lowpoly.objects import object_look
from envs.lowpoly.rooms import TEXTURES, arena_look, texture_png
from envs.lowpoly.shapes import Color, Shape, joined

# What keeps a drawn geom out of physics: it touches nothing and weighs nothing. Group 1 is what the cameras see.
DRAWN = {"group": "1", "contype": "0", "conaffinity": "0", "mass": "0", "material": "matt"}
# Emission lightens upright faces, which LIBERO's lamps straight above hardly reach.
MATT = {"name": "matt", "emission": "0.2", "specular": "0.15", "shininess": "0.1"}


# The pack's folder, and its last 8 digits identify the looks in the records of runs. The number says nothing by itself:
# change it whenever something else is drawn, or caches keep the old pack and runs go on with other pictures. The test
# `test_the_pack_is_drawn_as_its_name_promises` fails if it was forgotten.
PACK_NAME = "lowpoly-e981a0a7b12e"


def ensure_pack(cache_dir: Path) -> Path:
    """The absolute path of the pack below `cache_dir`, written first if it is not there (a second).

    It appears at once and whole, so that several processes may ask at the same time. Raises BadInput.
    """
    folder = Path(cache_dir).absolute() / PACK_NAME
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{PACK_NAME}-", dir=folder.parent) as unfinished:
            whole = (
                Path(unfinished) / PACK_NAME
            )  # inside, because a temporary folder itself is closed to other users
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
    """Write the pack's files into a folder."""
    files = {file.path: asset_mjcf(file, look_of(file)).encode() for file in load_facts()}
    for path, content in (files | {f"textures/{name}": texture_png(name) for name in TEXTURES}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def look_of(file: AssetFile) -> Look:
    return arena_look(file) if file.is_arena else object_look(file)


def asset_mjcf(file: AssetFile, look: Look) -> str:
    """The text of an asset file. Elements that physics knows keep the order of the original: contacts depend on it."""
    root = ET.Element("mujoco", model=file.name)
    if file.compiler:
        ET.SubElement(root, "compiler", _text(file.compiler))
    asset = ET.SubElement(root, "asset")
    ET.SubElement(asset, "material", MATT)
    for tag, attributes in look.assets:
        ET.SubElement(asset, tag, _text(attributes))
    _write_body(ET.SubElement(root, "worldbody"), file.worldbody, file, look, asset)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _write_body(element: ET.Element, body: Body, file: AssetFile, look: Look, asset: ET.Element) -> None:
    for tag, attributes in body.elements:
        ET.SubElement(element, tag, _text({**attributes, **look.paint.get(attributes.get("name", ""), {})}))
    for geom in body.geoms:
        # Physics stays, and so do an arena's walls, table top and legs: LIBERO's code looks these up by name.
        if not geom.only_drawn or (file.is_arena and geom.attributes["type"] != "mesh"):
            paint = look.paint.get(geom.attributes.get("name", ""), {})
            ET.SubElement(element, "geom", _text({**geom.attributes, **paint}))
    by_color: dict[
        Color, list[Shape]
    ] = {}  # one geom for each: drawing costs by the geom as well as by the face
    for shape in look.shapes.get(body.name, ()):
        by_color.setdefault(shape.color, []).append(shape)
    for color, shapes in by_color.items():
        name = f"{file.name}_{body.name or None}_{len(asset)}"
        mesh = joined([(shape.vertices, shape.normals, shape.faces) for shape in shapes], color)
        numbers = {
            "vertex": _numbers(mesh.vertices),
            "normal": _numbers(mesh.normals),
            "face": _numbers(mesh.faces),
        }
        ET.SubElement(asset, "mesh", {"name": name, **numbers})
        rgba = _numbers([*color, 1.0] if len(color) == 3 else color)
        ET.SubElement(element, "geom", {"type": "mesh", "mesh": name, "rgba": rgba, **DRAWN})
    for child in body.bodies:
        _write_body(ET.SubElement(element, "body", _text(child.attributes)), child, file, look, asset)


def _numbers(values: Sequence[float] | np.ndarray) -> str:
    return " ".join(f"{value:.5g}" for value in np.ravel(values))


def _text(attributes: Attributes) -> dict[str, str]:
    """Attributes as MJCF writes them. Numbers keep every digit, or physics would not be that of the original."""
    return {
        key: " ".join(map(repr, value)) if isinstance(value, (list, tuple)) else str(value)
        for key, value in attributes.items()
    }
