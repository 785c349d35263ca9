"""Coloured triangle meshes with few faces: boxes, surfaces of revolution, tubes.

A `Shape` is one closed surface in the frame of the body it is drawn in, in metres. MuJoCo's own primitives are not
used: it draws a box as 192 triangles and a capsule as about 900, here a box has 12.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Vector = Sequence[float] | np.ndarray
Color = tuple[float, ...]  # red, green, blue and, if not opaque, alpha, from 0 to 1

SHARP_BEND = np.cos(np.radians(40.0))  # a profile that bends more than this shows an edge


@dataclass(frozen=True)
class Shape:
    vertices: np.ndarray  # float (n, 3)
    normals: np.ndarray  # float (n, 3), of unit length, outwards
    faces: np.ndarray  # int (m, 3), indices into vertices, counter-clockwise seen from outside
    color: Color

    def placed(self, pos: Vector = (0, 0, 0), quat: Vector = (1, 0, 0, 0)) -> "Shape":
        """The shape turned by a quaternion (w, x, y, z), then moved."""
        turn = rotation(quat)
        return replace(self, vertices=self.vertices @ turn.T + np.asarray(pos), normals=self.normals @ turn.T)

    def stretched(self, factors: Vector) -> "Shape":
        """The shape scaled along x, y and z by positive factors."""
        normals = self.normals / np.asarray(factors)
        normals /= np.linalg.norm(normals, axis=1, keepdims=True)
        return replace(self, vertices=self.vertices * np.asarray(factors), normals=normals)


def joined(patches: Iterable[tuple[np.ndarray, np.ndarray, Any]], color: Color) -> Shape:
    """One shape of patches (vertices, normals, faces), whose faces count from the first vertex of their own patch."""
    vertices, normals, faces = zip(*patches, strict=True)
    first = np.cumsum([0, *map(len, vertices[:-1])])
    counted = [np.asarray(patch) + start for patch, start in zip(faces, first, strict=True)]
    return Shape(np.concatenate(vertices), np.concatenate(normals), np.concatenate(counted), color)


def rotation(quat: Vector) -> np.ndarray:
    """The matrix (3, 3) of a quaternion (w, x, y, z) of any length, as MuJoCo reads it."""
    w, x, y, z = np.asarray(quat, float) / np.linalg.norm(quat)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def box(low: Vector, high: Vector, color: Color) -> Shape:
    """A box from its lower and upper corner."""
    low, high = np.asarray(low, float), np.asarray(high, float)
    patches = []
    for axis in range(3):
        across, up = (axis + 1) % 3, (axis + 2) % 3
        for side, end, faces in ((-1, low, [[3, 2, 1], [3, 1, 0]]), (1, high, [[0, 1, 2], [0, 2, 3]])):
            corners = np.tile(low, (4, 1))
            corners[:, axis] = end[axis]
            corners[[1, 2], across] = high[across]
            corners[[2, 3], up] = high[up]
            patches.append((corners, np.tile(side * np.eye(3)[axis], (4, 1)), faces))
    return joined(patches, color)


def prism(outline: Sequence[Vector], low: float, high: float, color: Color) -> Shape:
    """A convex outline of points (y, z), counter-clockwise, drawn out along x."""
    bottom, top = (
        np.column_stack([np.full(len(outline), x), np.asarray(outline, float)]) for x in (low, high)
    )
    following = [*range(1, len(outline)), 0]
    walls = [np.array([bottom[i], bottom[j], top[j], top[i]]) for i, j in enumerate(following)]
    patches = []
    for polygon in [top, bottom[::-1], *walls]:
        normal = np.cross(polygon[1] - polygon[0], polygon[2] - polygon[1])
        normals = np.tile(normal / np.linalg.norm(normal), (len(polygon), 1))
        patches.append((polygon, normals, _fan(len(polygon))))
    return joined(patches, color)


def lathe(profile: Sequence[Vector], color: Color, segments: int = 20) -> Shape:
    """The surface of a profile of points (radius, height) turned about the z axis.

    The outside is to the right of the profile: a solid starts at the axis below, runs up outside and ends at the axis
    above; a bowl turns back at its rim and runs down inside; a ring ends where it began.
    """
    points = np.asarray(profile, float)
    step = np.diff(points, axis=0)
    outward = np.stack([step[:, 1], -step[:, 0]], 1) / np.linalg.norm(step, axis=1, keepdims=True)
    angles = np.arange(segments) * 2 * np.pi / segments
    circle = np.stack([np.cos(angles), np.sin(angles)], 1)
    patches = []
    for i in range(len(step)):
        vertices, normals, faces = [], [], []
        for end, neighbour in ((i, i - 1), (i + 1, i + 1)):
            normal = outward[i]
            if 0 <= neighbour < len(step) and outward[neighbour] @ normal > SHARP_BEND:
                normal = (normal + outward[neighbour]) / np.linalg.norm(normal + outward[neighbour])
            radius, height = points[end]
            vertices.append(np.column_stack([radius * circle, np.full(segments, height)]))
            normals.append(np.column_stack([normal[0] * circle, np.full(segments, normal[1])]))
        for a in range(segments):
            b = (a + 1) % segments
            if points[i][0] > 0:
                faces.append([a, b, segments + b])
            if points[i + 1][0] > 0:
                faces.append([a, segments + b, segments + a])
        patches.append((np.concatenate(vertices), np.concatenate(normals), faces))
    return joined(patches, color)


def cylinder(radius: float, low: float, high: float, color: Color, segments: int = 20) -> Shape:
    """A solid cylinder about the z axis."""
    return lathe([(0, low), (radius, low), (radius, high), (0, high)], color, segments)


def ring(inner: float, outer: float, low: float, high: float, color: Color, segments: int = 20) -> Shape:
    """A flat ring or a sleeve about the z axis."""
    return lathe([(inner, low), (outer, low), (outer, high), (inner, high), (inner, low)], color, segments)


def tube(path: Sequence[Vector], radius: float, color: Color, sides: int = 6) -> Shape:
    """A bent rod, such as a mug's handle: `sides` corners around a path that lies in one plane."""
    points = np.asarray(path, float)
    along = np.gradient(points, axis=0)
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    bend = np.cross(points[1] - points[0], points[-1] - points[1])
    if np.linalg.norm(bend) <= 1e-12:  # a straight rod: any direction across it
        bend = np.cross(along[0], np.eye(3)[np.argmin(np.abs(along[0]))])
    aside = bend / np.linalg.norm(bend)
    angles = np.arange(sides) * 2 * np.pi / sides
    cos, sin = np.cos(angles), np.sin(angles)
    normals = [np.outer(cos, aside) + np.outer(sin, np.cross(direction, aside)) for direction in along]
    circles = [point + radius * normal for point, normal in zip(points, normals, strict=True)]
    faces = []
    for low in range(0, (len(points) - 1) * sides, sides):
        for a in range(sides):
            b, high = (a + 1) % sides, low + sides
            faces += [[low + a, low + b, high + b], [low + a, high + b, high + a]]
    wall = np.concatenate(circles), np.concatenate(normals), faces
    start = circles[0][::-1], np.tile(-along[0], (sides, 1)), _fan(sides)
    end = circles[-1], np.tile(along[-1], (sides, 1)), _fan(sides)
    return joined([wall, start, end], color)


def _fan(corners: int) -> list[list[int]]:
    """The triangles of a convex polygon."""
    return [[0, i, i + 1] for i in range(1, corners - 1)]
