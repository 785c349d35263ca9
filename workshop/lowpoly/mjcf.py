"""Write an asset file as MJCF: LIBERO's physics from `facts`, and what is drawn from a `Look`."""

from collections.abc import Sequence
from xml.etree import ElementTree as ET

import numpy as np

from workshop.lowpoly.facts import AssetFile, Attributes, Body, Geom, Look
from workshop.lowpoly.shapes import Color, Shape, joined

# These attributes keep a drawn geom out of physics: it touches nothing and weighs nothing. Cameras see group 1.
DRAWN = {"group": "1", "contype": "0", "conaffinity": "0", "mass": "0", "material": "matt"}
# Emission brightens upright faces, which get little light from LIBERO's lamps straight above.
MATT = {"name": "matt", "emission": "0.2", "specular": "0.15", "shininess": "0.1"}


def asset_mjcf(file: AssetFile, look: Look) -> str:
    """The MJCF text of an asset file with this look.

    Elements that matter to physics keep their original order, because contacts depend on it.
    """
    root = ET.Element("mujoco", model=file.name)
    if file.compiler:
        ET.SubElement(root, "compiler", _as_text(file.compiler))
    assets = ET.SubElement(root, "asset")
    ET.SubElement(assets, "material", MATT)
    for tag, attributes in look.assets:
        ET.SubElement(assets, tag, _as_text(attributes))
    _write_body(ET.SubElement(root, "worldbody"), file.worldbody, file, look, assets)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _write_body(element: ET.Element, body: Body, file: AssetFile, look: Look, assets: ET.Element) -> None:
    """Write a body and all bodies below it into its XML element; the meshes that are drawn go into `assets`."""
    for tag, attributes in body.elements:
        ET.SubElement(element, tag, _as_text(_painted(attributes, look)))
    for geom in body.geoms:
        if _is_kept(geom, file):
            ET.SubElement(element, "geom", _as_text(_painted(geom.attributes, look)))
    for color, shapes in _by_color(look.shapes.get(body.name, ())).items():
        _write_mesh(element, f"{file.name}_{body.name or None}_{len(assets)}", shapes, color, assets)
    for child in body.bodies:
        child_element = ET.SubElement(element, "body", _as_text(child.attributes))
        _write_body(child_element, child, file, look, assets)


def _is_kept(geom: Geom, file: AssetFile) -> bool:
    """Whether a geom of the original is written: if physics needs it, or if LIBERO's code looks it up by name.

    LIBERO looks up an arena's walls, table top and legs.
    """
    is_looked_up = file.is_arena and geom.attributes["type"] != "mesh"
    return is_looked_up or not geom.only_drawn


def _painted(attributes: Attributes, look: Look) -> Attributes:
    return {**attributes, **look.paint.get(attributes.get("name", ""), {})}


def _by_color(shapes: Sequence[Shape]) -> dict[Color, list[Shape]]:
    """Group shapes by colour. Those of one colour become one geom: not only faces but also geoms cost drawing time."""
    by_color: dict[Color, list[Shape]] = {}
    for shape in shapes:
        by_color.setdefault(shape.color, []).append(shape)
    return by_color


def _write_mesh(
    element: ET.Element, name: str, shapes: Sequence[Shape], color: Color, assets: ET.Element
) -> None:
    mesh = joined([(shape.vertices, shape.normals, shape.faces) for shape in shapes], color)
    arrays = {"vertex": mesh.vertices, "normal": mesh.normals, "face": mesh.faces}
    ET.SubElement(assets, "mesh", {"name": name, **{key: _numbers(array) for key, array in arrays.items()}})
    rgba = [*color, 1.0] if len(color) == 3 else color
    ET.SubElement(element, "geom", {"type": "mesh", "mesh": name, "rgba": _numbers(rgba), **DRAWN})


def _numbers(values: Sequence[float] | np.ndarray) -> str:
    return " ".join(f"{value:.5g}" for value in np.ravel(values))


def _as_text(attributes: Attributes) -> dict[str, str]:
    """Attributes as MJCF writes them. Numbers keep every digit, otherwise physics would differ from the original."""
    text = {}
    for key, value in attributes.items():
        if isinstance(value, (list, tuple)):
            text[key] = " ".join(repr(part) for part in value)
        else:
            text[key] = str(value)
    return text
