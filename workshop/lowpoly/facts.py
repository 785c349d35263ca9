"""Read `facts.json`, which holds what LIBERO's own asset files say about bodies, joints, sites and collision.

The numbers were read from LIBERO's MJCF files. `facts.json` holds no meshes and textures, only a bounding box of each
visual mesh and the mean colour of most textures. Our looks take their sizes from these facts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from workshop.lowpoly.shapes import Color, Shape, Vector, box

Attributes = Mapping[str, Any]  # the attributes of one MJCF element: numbers, lists of numbers or strings
# MJCF tags; facts.json lists the elements of each under its plural.
ELEMENTS = ("inertial", "joint", "site", "camera", "light")
# Keys of a geom that describe what its original looks like; they are not MJCF.
LOOK_KEYS = {"mesh_box", "look_rgb", "material_rgba"}
GREY = (0.6, 0.6, 0.6)
ALL = slice(None)


@dataclass(frozen=True)
class Geom:
    """One MJCF geom, and what its original looks like."""

    attributes: Attributes  # those of MJCF, without LOOK_KEYS
    mesh_box: tuple[Vector, Vector] | None  # lower and upper corner in the geom's frame, metres
    color: Color | None  # mean colour of the original's texture, or its material's colour

    @property
    def only_drawn(self) -> bool:
        """Whether the geom has no effect on physics: it touches nothing and is not in group 0, whose mass counts."""
        touches_nothing = self.attributes.get("contype") == 0 and self.attributes.get("conaffinity") == 0
        return touches_nothing and self.attributes["group"] != 0

    def box(self, low: Vector, high: Vector, color: Color) -> Shape:
        """A box with corners in the geom's frame, as a shape in the body's frame."""
        pose = {key: self.attributes[key] for key in ("pos", "quat") if key in self.attributes}
        return box(low, high, color).placed(**pose)


@dataclass(frozen=True)
class Body:
    """One MJCF body with everything in it."""

    name: str  # "" for a body without a name
    attributes: Attributes  # name, pos, quat
    elements: tuple[tuple[str, Attributes], ...]  # (tag, attributes), in the order of ELEMENTS
    geoms: tuple[Geom, ...]
    bodies: tuple["Body", ...]

    @property
    def collision_boxes(self) -> tuple[Geom, ...]:
        """The boxes that collide."""
        return tuple(geom for geom in self.geoms if not geom.only_drawn and geom.attributes["type"] == "box")

    def walk(self) -> Iterator["Body"]:
        """The body itself and all bodies below it, parents first."""
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
        """The bodies that have a name, by name."""
        return {body.name: body for body in self.worldbody.walk() if body.name}


@dataclass(frozen=True)
class Look:
    """What an asset file looks like."""

    shapes: Mapping[str, Sequence[Shape]]  # by name of the body that they are fixed to ("": it has no name)
    # Attributes that are added to the original's lights and geoms, by name of the light or geom.
    paint: Mapping[str, Attributes] = field(default_factory=dict)
    assets: Sequence[tuple[str, Attributes]] = ()  # (tag, attributes) of textures and materials


def load_facts() -> tuple[AssetFile, ...]:
    """All asset files of `facts.json`."""
    facts = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))
    return tuple(
        AssetFile(
            path=path,
            compiler=file["compiler"],
            textures=file["textures"],
            worldbody=_body({"name": "world", **file["worldbody"]}),
        )
        for path, file in facts["files"].items()
    )


def _body(raw: Mapping[str, Any]) -> Body:
    elements = [(tag, element) for tag in ELEMENTS for element in raw.get(f"{tag}s", ())]
    return Body(
        name=raw.get("name", ""),
        attributes={key: raw[key] for key in ("name", "pos", "quat") if key in raw},
        elements=tuple(elements),
        geoms=tuple(_geom(geom) for geom in raw.get("geoms", ())),
        bodies=tuple(_body(body) for body in raw.get("bodies", ())),
    )


def _geom(raw: Mapping[str, Any]) -> Geom:
    color = raw.get("look_rgb") or raw.get("material_rgba")
    return Geom(
        attributes={key: value for key, value in raw.items() if key not in LOOK_KEYS},
        mesh_box=raw.get("mesh_box"),
        color=None if color is None else tuple(color[:3]),
    )


def collision_shapes(body: Body, color: Color, only: slice = ALL) -> list[Shape]:
    """Shapes of the body's collision boxes, or of a slice of them. Such a look neither floats nor sinks in."""
    shapes = []
    for geom in body.collision_boxes[only]:
        half_size = np.asarray(geom.attributes["size"])
        shapes.append(geom.box(-half_size, half_size, color))
    return shapes


def extent(body: Body, only: slice = ALL) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper corner (3,) of all collision boxes together, in metres, in the body's frame."""
    corners = np.concatenate([shape.vertices for shape in collision_shapes(body, GREY, only)])
    return corners.min(0), corners.max(0)


def plain_look(file: AssetFile) -> Look:
    """The look of an object without an entry in looks.json: collision boxes in the mean colour of its texture.

    A body that does not collide is drawn as the bounding boxes of its meshes.
    """
    shapes = {}
    for body in file.worldbody.walk():
        drawn = [geom for geom in body.geoms if geom.only_drawn]
        colors = [geom.color for geom in drawn if geom.color]
        boxes = collision_shapes(body, colors[0] if colors else GREY)
        if not boxes:
            boxes = [geom.box(*geom.mesh_box, geom.color or GREY) for geom in drawn if geom.mesh_box]
        shapes[body.name] = boxes
    return Look(shapes)
