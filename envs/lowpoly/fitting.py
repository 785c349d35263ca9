"""Shapes that take their measure from the facts: from collision boxes, where there are any, else from mesh boxes."""

import numpy as np

from envs.lowpoly.facts import AssetFile, Body, Geom
from envs.lowpoly.mjcf import Look
from envs.lowpoly.palette import Color
from envs.lowpoly.shapes import Shape, box

GREY = (0.6, 0.6, 0.6)


def collision_shapes(body: Body, color: Color, only: slice = slice(None)) -> list[Shape]:
    """The body's collision boxes themselves (or some of them, in their order): nothing floats, nothing sinks."""
    return [_collision_box(geom, color) for geom in body.collision_boxes[only]]


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
        shapes[body.name or ""] = collision_shapes(body, color) or [
            box(*geom.mesh_box, geom.color or GREY).placed(**_pose(geom)) for geom in drawn if geom.mesh_box
        ]
    return Look(shapes)


def _collision_box(geom: Geom, color: Color) -> Shape:
    half = np.asarray(geom.attributes["size"])
    return box(-half, half, color).placed(**_pose(geom))


def _pose(geom: Geom) -> dict[str, list[float]]:
    return {key: geom.attributes[key] for key in ("pos", "quat") if key in geom.attributes}
