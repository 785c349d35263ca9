"""Make coloured triangle meshes with few faces: boxes, surfaces of revolution, tubes.

A `Shape` is one closed surface in the frame of its body, in metres. MuJoCo's own primitives are not used, because it
draws a box as 192 triangles and a capsule as about 900. Here a box has 12.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

Vector = Sequence[float] | np.ndarray
Color = tuple[float, ...]  # red, green, blue and, if not opaque, alpha, from 0 to 1

# Cosine of the angle between two segments of a profile. Where they bend more, an edge is visible, not a round surface.
SHARP_BEND = np.cos(np.radians(40.0))


@dataclass(frozen=True)
class Shape:
    """A triangle mesh of one colour."""

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


Patch = tuple[np.ndarray, np.ndarray, Sequence[Sequence[int]] | np.ndarray]  # vertices, normals, faces


def joined(patches: Iterable[Patch], color: Color) -> Shape:
    """Join patches to one shape. The faces of a patch are indices into the vertices of that patch."""
    vertices, normals, faces = zip(*patches, strict=True)
    first_vertices = np.cumsum([0, *[len(part) for part in vertices[:-1]]])
    shifted = [np.asarray(part) + first for part, first in zip(faces, first_vertices, strict=True)]
    return Shape(np.concatenate(vertices), np.concatenate(normals), np.concatenate(shifted), color)


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
    low = np.asarray(low, float)
    high = np.asarray(high, float)
    patches = []
    for axis in range(3):
        across = (axis + 1) % 3
        up = (axis + 2) % 3
        for side, end, faces in ((-1, low, [[3, 2, 1], [3, 1, 0]]), (1, high, [[0, 1, 2], [0, 2, 3]])):
            corners = np.tile(low, (4, 1))
            corners[:, axis] = end[axis]
            corners[[1, 2], across] = high[across]
            corners[[2, 3], up] = high[up]
            normals = np.tile(side * np.eye(3)[axis], (4, 1))
            patches.append((corners, normals, faces))
    return joined(patches, color)


def prism(outline: Sequence[Vector], low: float, high: float, color: Color) -> Shape:
    """A convex outline of points (y, z), counter-clockwise, extruded along x from `low` to `high`."""
    num_corners = len(outline)
    bottom = np.column_stack([np.full(num_corners, low), np.asarray(outline, float)])
    top = np.column_stack([np.full(num_corners, high), np.asarray(outline, float)])
    polygons = [top, bottom[::-1]]
    for i in range(num_corners):
        following = (i + 1) % num_corners
        polygons.append(np.array([bottom[i], bottom[following], top[following], top[i]]))
    patches = []
    for polygon in polygons:
        normal = np.cross(polygon[1] - polygon[0], polygon[2] - polygon[1])
        normals = np.tile(normal / np.linalg.norm(normal), (len(polygon), 1))
        patches.append((polygon, normals, _fan(len(polygon))))
    return joined(patches, color)


def lathe(profile: Sequence[Vector], color: Color, segments: int = 20) -> Shape:
    """The surface of revolution of a profile of points (radius, height) about the z axis.

    The outside is to the right of the profile. The profile of a solid starts on the axis at the bottom, goes up along
    the outside and ends on the axis at the top. That of a bowl turns back at the rim and goes down along the inside.
    That of a ring ends where it began.
    """
    points = np.asarray(profile, float)
    steps = np.diff(points, axis=0)
    outwards = np.stack([steps[:, 1], -steps[:, 0]], 1) / np.linalg.norm(steps, axis=1, keepdims=True)
    angles = np.arange(segments) * 2 * np.pi / segments
    circle = np.stack([np.cos(angles), np.sin(angles)], 1)
    patches = []
    for i in range(len(steps)):
        vertices = []
        normals = []
        for end, neighbour in ((i, i - 1), (i + 1, i + 1)):
            normal = _lathe_normal(outwards, i, neighbour)
            radius, height = points[end]
            vertices.append(np.column_stack([radius * circle, np.full(segments, height)]))
            normals.append(np.column_stack([normal[0] * circle, np.full(segments, normal[1])]))
        faces = _belt(segments, start_is_open=points[i][0] > 0, end_is_open=points[i + 1][0] > 0)
        patches.append((np.concatenate(vertices), np.concatenate(normals), faces))
    return joined(patches, color)


def _lathe_normal(outwards: np.ndarray, i: int, neighbour: int) -> np.ndarray:
    """The normal (2,) of segment i at its end towards segment `neighbour`, which may not exist.

    At a gentle bend it is the mean of both segments' normals, so that the surface looks round.
    """
    normal = outwards[i]
    if 0 <= neighbour < len(outwards) and outwards[neighbour] @ normal > SHARP_BEND:
        normal = (normal + outwards[neighbour]) / np.linalg.norm(normal + outwards[neighbour])
    return normal


def _belt(segments: int, start_is_open: bool, end_is_open: bool) -> list[list[int]]:
    """The triangles between two circles of vertices. A circle of radius 0 is not open: it has no triangles."""
    faces = []
    for a in range(segments):
        b = (a + 1) % segments
        if start_is_open:
            faces.append([a, b, segments + b])
        if end_is_open:
            faces.append([a, segments + b, segments + a])
    return faces


def cylinder(radius: float, low: float, high: float, color: Color, segments: int = 20) -> Shape:
    """A solid cylinder about the z axis."""
    return lathe([(0, low), (radius, low), (radius, high), (0, high)], color, segments)


def ring(inner: float, outer: float, low: float, high: float, color: Color, segments: int = 20) -> Shape:
    """A flat ring or a sleeve about the z axis."""
    return lathe([(inner, low), (outer, low), (outer, high), (inner, high), (inner, low)], color, segments)


def tube(path: Sequence[Vector], radius: float, color: Color, sides: int = 6) -> Shape:
    """A bent rod, such as a mug's handle: `sides` corners around a path that lies in one plane."""
    points = np.asarray(path, float)
    directions = np.gradient(points, axis=0)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    plane_normal = np.cross(points[1] - points[0], points[-1] - points[1])
    is_straight = np.linalg.norm(plane_normal) <= 1e-12
    if is_straight:  # any direction across the rod is good enough
        plane_normal = np.cross(directions[0], np.eye(3)[np.argmin(np.abs(directions[0]))])
    aside = plane_normal / np.linalg.norm(plane_normal)
    angles = np.arange(sides) * 2 * np.pi / sides
    normals = [
        np.outer(np.cos(angles), aside) + np.outer(np.sin(angles), np.cross(direction, aside))
        for direction in directions
    ]
    circles = [point + radius * normal for point, normal in zip(points, normals, strict=True)]
    faces = []
    for start in range(0, (len(points) - 1) * sides, sides):
        for a in range(sides):
            b = (a + 1) % sides
            end = start + sides
            faces += [[start + a, start + b, end + b], [start + a, end + b, end + a]]
    wall = (np.concatenate(circles), np.concatenate(normals), faces)
    start_cap = (circles[0][::-1], np.tile(-directions[0], (sides, 1)), _fan(sides))
    end_cap = (circles[-1], np.tile(directions[-1], (sides, 1)), _fan(sides))
    return joined([wall, start_cap, end_cap], color)


def _fan(num_corners: int) -> list[list[int]]:
    """The triangles of a convex polygon."""
    return [[0, i, i + 1] for i in range(1, num_corners - 1)]
