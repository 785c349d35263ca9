"""Writes one MJCF file: the physics of the original, element by element, and the shapes that are drawn instead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

import numpy as np

from envs.lowpoly.facts import AssetFile, Attributes, Body, Geom
from envs.lowpoly.palette import Color
from envs.lowpoly.shapes import Shape

# What keeps a drawn geom out of physics: it touches nothing and weighs nothing. Group 1 is what the cameras see.
DRAWN = {"group": "1", "contype": "0", "conaffinity": "0", "mass": "0", "material": "matt"}

# Emission lightens upright faces, which LIBERO's lamps straight above hardly reach.
MATT = {"name": "matt", "emission": "0.2", "specular": "0.15", "shininess": "0.1"}


@dataclass(frozen=True)
class Look:
    """What an asset file shows."""

    shapes: Mapping[str, Sequence[Shape]]  # by name of the body they are fixed to; "" for one without
    # Added to the original's lights and geoms, by name.
    paint: Mapping[str, Attributes] = field(default_factory=dict)
    assets: Sequence[tuple[str, Attributes]] = ()  # (tag, attributes) of textures and materials


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
        if _stays(geom, file):
            ET.SubElement(element, "geom", _text({**geom.attributes, **look.paint.get(geom.name or "", {})}))
    for color, shapes in _by_color(look.shapes.get(body.name or "", ())).items():
        mesh = f"{file.name}_{body.name}_{len(asset)}"
        ET.SubElement(asset, "mesh", _mesh(mesh, shapes))
        ET.SubElement(element, "geom", {"type": "mesh", "mesh": mesh, "rgba": _rgba(color), **DRAWN})
    for child in body.bodies:
        _write_body(ET.SubElement(element, "body", _text(child.attributes)), child, file, look, asset)


def _stays(geom: Geom, file: AssetFile) -> bool:
    """Physics stays, and so do an arena's walls, table top and legs: LIBERO's code looks these up by name."""
    return not geom.only_drawn or (file.is_arena and not geom.is_mesh)


def _by_color(shapes: Sequence[Shape]) -> dict[Color, list[Shape]]:
    """One geom for each colour: drawing costs by the geom as well as by the face."""
    groups: dict[Color, list[Shape]] = {}
    for shape in shapes:
        groups.setdefault(shape.color, []).append(shape)
    return groups


def _mesh(name: str, shapes: Sequence[Shape]) -> dict[str, str]:
    offsets = np.cumsum([0] + [len(shape.vertices) for shape in shapes[:-1]])
    return {
        "name": name,
        "vertex": _numbers(np.concatenate([shape.vertices for shape in shapes])),
        "normal": _numbers(np.concatenate([shape.normals for shape in shapes])),
        "face": _numbers(np.concatenate([shape.faces + offset for shape, offset in zip(shapes, offsets, strict=True)])),
    }


def _rgba(color: Color) -> str:
    return _numbers([*color, 1.0] if len(color) == 3 else color)


def _numbers(values: Sequence[float] | np.ndarray) -> str:
    return " ".join(f"{value:.5g}" for value in np.ravel(values))


def _text(attributes: Attributes) -> dict[str, str]:
    """Attributes as MJCF writes them. Numbers keep every digit, or physics would not be that of the original."""
    return {
        key: " ".join(map(repr, value)) if isinstance(value, (list, tuple)) else str(value)
        for key, value in attributes.items()
    }
