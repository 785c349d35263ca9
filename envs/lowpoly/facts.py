"""Typed access to `facts.json`: what LIBERO's own asset files say about bodies, joints, sites and collision.

The numbers were read from LIBERO's MJCF files; its meshes and textures are not part of them. What is left of those is
a bounding box for each visual mesh and the mean colour of most textures, which `looks` takes as its measure.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from envs.lowpoly.palette import Color

FACTS_FILE = Path(__file__).with_name("facts.json")

Attributes = Mapping[str, Any]  # of one MJCF element: numbers, lists of numbers or strings

# Keys of a geom that describe the look of the original and are no MJCF attributes.
_LOOK_KEYS = {"mesh_box", "look_rgb", "material_rgba"}


@dataclass(frozen=True)
class Geom:
    attributes: Attributes  # MJCF attributes, without those of the original's look
    mesh_box: tuple[tuple[float, ...], tuple[float, ...]] | None  # lower and upper corner in the geom's frame, metres
    color: Color | None  # mean colour of the original's texture, or its material's colour

    @property
    def name(self) -> str | None:
        return self.attributes.get("name")

    @property
    def is_mesh(self) -> bool:
        return self.attributes["type"] == "mesh"

    @property
    def only_drawn(self) -> bool:
        """True if physics never sees the geom: it touches nothing and is outside group 0, whose mass counts."""
        touches_nothing = self.attributes.get("contype") == 0 and self.attributes.get("conaffinity") == 0
        return touches_nothing and self.attributes["group"] != 0


@dataclass(frozen=True)
class Body:
    attributes: Attributes  # name, pos, quat
    elements: tuple[tuple[str, Attributes], ...]  # (tag, attributes) of inertials, joints, sites, cameras and lights
    geoms: tuple[Geom, ...]
    bodies: tuple["Body", ...]

    @property
    def name(self) -> str | None:
        return self.attributes.get("name")

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
        return {body.name: body for body in self.worldbody.walk() if body.name is not None}


def load_facts() -> tuple[AssetFile, ...]:
    files = json.loads(FACTS_FILE.read_text(encoding="utf-8"))["files"]
    return tuple(_asset_file(path, file) for path, file in files.items())


def _asset_file(path: str, raw: dict) -> AssetFile:
    return AssetFile(path, raw["compiler"], raw["textures"], _body({"name": "world", **raw["worldbody"]}))


def _body(raw: dict) -> Body:
    kinds = {"inertials": "inertial", "joints": "joint", "sites": "site", "cameras": "camera", "lights": "light"}
    return Body(
        attributes={key: raw[key] for key in ("name", "pos", "quat") if key in raw},
        elements=tuple((tag, element) for kind, tag in kinds.items() for element in raw.get(kind, ())),
        geoms=tuple(_geom(geom) for geom in raw.get("geoms", ())),
        bodies=tuple(_body(child) for child in raw.get("bodies", ())),
    )


def _geom(raw: dict) -> Geom:
    box = raw.get("mesh_box")
    color = raw.get("look_rgb") or raw.get("material_rgba")
    return Geom(
        attributes={key: value for key, value in raw.items() if key not in _LOOK_KEYS},
        mesh_box=None if box is None else (tuple(box[0]), tuple(box[1])),
        color=None if color is None else tuple(color[:3]),
    )
