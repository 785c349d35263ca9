"""Typed access to `facts.json`: what LIBERO's own asset files say about bodies, joints, sites and collision.

The numbers were read from LIBERO's MJCF files. Of its meshes and textures there are only a bounding box for each visual
mesh and the mean colour of most textures. Looks take their measure from these facts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from envs.lowpoly.shapes import Color, Shape, Vector, box

Attributes = Mapping[str, Any]  # of one MJCF element: numbers, lists of numbers or strings
ELEMENTS = {
    "inertials": "inertial",
    "joints": "joint",
    "sites": "site",
    "cameras": "camera",
    "lights": "light",
}
LOOK_KEYS = {
    "mesh_box",
    "look_rgb",
    "material_rgba",
}  # of a geom: they describe the original's look, and are no MJCF
GREY = (0.6, 0.6, 0.6)


@dataclass(frozen=True)
class Geom:
    attributes: Attributes  # MJCF attributes, without those of the original's look
    mesh_box: tuple[Vector, Vector] | None  # lower and upper corner in the geom's frame, metres
    color: Color | None  # mean colour of the original's texture, or its material's colour

    @property
    def only_drawn(self) -> bool:
        """True if physics never sees the geom: it touches nothing and is outside group 0, whose mass counts."""
        touches_nothing = self.attributes.get("contype") == 0 and self.attributes.get("conaffinity") == 0
        return touches_nothing and self.attributes["group"] != 0

    def box(self, low: Vector, high: Vector, color: Color) -> Shape:
        """A box in the geom's frame, as a shape in the body's."""
        return box(low, high, color).placed(
            **{k: self.attributes[k] for k in ("pos", "quat") if k in self.attributes}
        )


@dataclass(frozen=True)
class Body:
    name: str  # "" for one without
    attributes: Attributes  # name, pos, quat
    elements: tuple[
        tuple[str, Attributes], ...
    ]  # (tag, attributes) of inertials, joints, sites, cameras and lights
    geoms: tuple[Geom, ...]
    bodies: tuple["Body", ...]

    @property
    def collision_boxes(self) -> tuple[Geom, ...]:
        return tuple(g for g in self.geoms if not g.only_drawn and g.attributes["type"] == "box")

    def walk(self) -> Iterator["Body"]:
        """The body itself and all below it, parents first."""
        yield self
        for child in self.bodies:
            yield from child.walk()


@dataclass(frozen=True)
class AssetFile:
    """One MJCF file that LIBERO's code loads by its path below the asset folder."""

    path: str  # such as "stable_hope_objects/milk/milk.xml"
    compiler: Attributes
    textures: Mapping[str, Attributes]
    worldbody: Body  # its name is "world"

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def is_arena(self) -> bool:
        return self.path.startswith("scenes/")

    @cached_property
    def body(self) -> Mapping[str, Body]:
        """Named bodies by name."""
        return {body.name: body for body in self.worldbody.walk() if body.name}


@dataclass(frozen=True)
class Look:
    """What an asset file shows."""

    shapes: Mapping[str, Sequence[Shape]]  # by name of the body they are fixed to; "" for one without
    paint: Mapping[str, Attributes] = field(
        default_factory=dict
    )  # added to the original's lights and geoms, by name
    assets: Sequence[tuple[str, Attributes]] = ()  # (tag, attributes) of textures and materials


def load_facts() -> tuple[AssetFile, ...]:
    files = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))["files"]
    return tuple(
        AssetFile(path, file["compiler"], file["textures"], _body({"name": "world", **file["worldbody"]}))
        for path, file in files.items()
    )


def _body(raw: dict) -> Body:
    return Body(
        name=raw.get("name", ""),
        attributes={key: raw[key] for key in ("name", "pos", "quat") if key in raw},
        elements=tuple((tag, element) for kind, tag in ELEMENTS.items() for element in raw.get(kind, ())),
        geoms=tuple(map(_geom, raw.get("geoms", ()))),
        bodies=tuple(map(_body, raw.get("bodies", ()))),
    )


def _geom(raw: dict) -> Geom:
    color = raw.get("look_rgb") or raw.get("material_rgba")
    attributes = {key: value for key, value in raw.items() if key not in LOOK_KEYS}
    return Geom(attributes, raw.get("mesh_box"), None if color is None else tuple(color[:3]))


def collision_shapes(body: Body, color: Color, only: slice = slice(None)) -> list[Shape]:
    """The body's collision boxes themselves (or some of them, in their order): nothing floats, nothing sinks."""
    return [
        g.box(-np.asarray(g.attributes["size"]), g.attributes["size"], color)
        for g in body.collision_boxes[only]
    ]


def extent(body: Body, only: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper corner (3,) of what collides, in the body's frame."""
    corners = np.concatenate([shape.vertices for shape in collision_shapes(body, GREY, only)])
    return corners.min(0), corners.max(0)


def plain_look(file: AssetFile) -> Look:
    """For an object without a look of its own: its boxes in the mean colour of its texture."""
    shapes = {}
    for body in file.worldbody.walk():
        drawn = [geom for geom in body.geoms if geom.only_drawn]
        color = next((geom.color for geom in drawn if geom.color), GREY)
        shapes[body.name] = collision_shapes(body, color) or [
            geom.box(*geom.mesh_box, geom.color or GREY) for geom in drawn if geom.mesh_box
        ]
    return Look(shapes)
