"""Furniture of the arenas: tables that collide, drawn by their collision boxes, and backgrounds that nothing touches.

Coordinates are those of the world, in metres; the robot looks to x, its back is towards the rear wall at x = -2.
Places and sizes follow the original's meshes where the facts have them.
"""

from collections.abc import Mapping, Sequence

from envs.lowpoly.facts import AssetFile
from envs.lowpoly.fitting import collision_shapes
from envs.lowpoly.palette import BLACK, DARK_WOOD, STEEL, WHITE, WOOD
from envs.lowpoly.shapes import Shape, box, cylinder, lathe, tube

BOOKS = ((0.55, 0.15, 0.13), (0.16, 0.27, 0.45), (0.80, 0.65, 0.25), (0.20, 0.38, 0.27), (0.12, 0.12, 0.13))

Scenery = Mapping[str, Sequence[Shape]]  # by name of the body


def scenery_of(file: AssetFile) -> Scenery:
    if "kitchen" in file.name:
        return {"world": kitchen_units()}
    if "living_room" in file.name:
        table = collision_shapes(file.body["living_room_table_col"], WOOD)
        return {"living_room_table_col": table, "world": wall_unit()}
    if "study" in file.name:
        return {"study_table": collision_shapes(file.body["study_table"], WOOD), "world": study_corner()}
    if "coffee_table" in file.body:
        return {"coffee_table": coffee_table(file)}
    return {}


def kitchen_units() -> list[Shape]:
    """Counter with doors, stove and pot in front of the rear wall, a fridge beside it."""
    front = -1.36
    counter = box((-1.95, -1.80, 0.10), (front, 1.80, 0.86), (0.40, 0.42, 0.36))
    top = box((-1.98, -1.82, 0.86), (front + 0.03, 1.82, 0.90), (0.78, 0.76, 0.72))
    doors = [box((front, y + 0.02, 0.14), (front + 0.015, y + 0.58, 0.82), (0.50, 0.53, 0.45)) for y in _steps(-1.8, 6)]
    handles = [box((front, y + 0.48, 0.60), (front + 0.03, y + 0.51, 0.74), STEEL) for y in _steps(-1.8, 6)]
    hob = box((-1.92, -0.38, 0.90), (front - 0.02, 0.40, 0.925), BLACK)
    pot = lathe([(0, 0.925), (0.10, 0.925), (0.105, 1.06), (0.02, 1.075), (0.02, 1.09), (0, 1.09)], STEEL)
    fridge = box((-1.97, -2.83, 0.0), (-1.53, -1.97, 1.77), STEEL)
    return [counter, top, *doors, *handles, hob, pot.placed((-1.55, 0.2, 0)), fridge]


def wall_unit() -> list[Shape]:
    """A long low board with a screen above it, between two shelves; a picture on the wall."""
    board = box((-1.95, -1.00, 0.05), (-1.45, 1.00, 0.50), DARK_WOOD)
    drawers = [box((-1.45, y + 0.02, 0.10), (-1.44, y + 0.48, 0.46), (0.46, 0.33, 0.25)) for y in _steps(-1.0, 4, 0.5)]
    screen = box((-1.95, -0.80, 0.65), (-1.88, 0.80, 1.50), BLACK)
    sides = [box((-1.95, y, 0.0), (-1.50, y + 0.60, 2.2), DARK_WOOD) for y in (-1.65, 1.05)]
    picture = box((-1.98, 0.15, 1.60), (-1.96, 1.02, 2.00), (0.75, 0.68, 0.55))
    return [board, *drawers, screen, *sides, picture]


def study_corner() -> list[Shape]:
    """Shelf with books, plant and picture at the rear wall, a lamp on the desk."""
    frame = [box((-1.85, y, 0.0), (-1.55, y + 0.03, 1.79), WHITE) for y in (-1.60, -0.42)]
    boards = [box((-1.85, -1.60, z), (-1.55, -0.39, z + 0.03), WHITE) for z in (0.05, 0.45, 0.85, 1.25, 1.76)]
    back = box((-1.87, -1.60, 0.0), (-1.85, -0.39, 1.79), (0.80, 0.79, 0.77))
    books = [
        box((-1.80, y, z + 0.03), (-1.60, y + 0.05, z + 0.27 - 0.02 * (number % 3)), BOOKS[number % len(BOOKS)])
        for z in (0.05, 0.45, 0.85, 1.25)
        for number, y in enumerate(_steps(-1.5, 12, 0.06))
    ]
    picture = [
        box((-1.99, 0.02, 1.02), (-1.96, 0.98, 1.96), (0.35, 0.24, 0.14)),
        box((-1.99, 0.07, 1.07), (-1.955, 0.93, 1.91), (0.60, 0.62, 0.52)),
    ]
    pot = lathe([(0, 0), (0.13, 0), (0.18, 0.35), (0, 0.35)], (0.70, 0.45, 0.32), segments=12)
    leaves = lathe([(0, 0.33), (0.10, 0.50), (0.32, 0.75), (0.26, 1.05), (0, 1.27)], (0.25, 0.42, 0.20), segments=9)
    return [*frame, *boards, back, *books, *picture, *(part.placed((-1.75, 0.5, 0)) for part in (pot, leaves)), *lamp()]


def lamp() -> list[Shape]:
    """A desk lamp behind the right edge of the desk."""
    foot = cylinder(0.08, 0.885, 0.905, BLACK, segments=16)
    arm = tube([(0, 0, 0.90), (0, 0.02, 1.20), (0, 0.16, 1.36)], 0.010, BLACK)
    shade = lathe([(0, 1.28), (0.075, 1.28), (0.03, 1.38), (0, 1.38)], BLACK, segments=16).placed((0, 0.17, 0))
    return [part.placed((0.30, -0.75, 0)) for part in (foot, arm, shade)]


def coffee_table(file: AssetFile) -> list[Shape]:
    legs = [
        box((x - 0.03, y - 0.03, 0.0), (x + 0.03, y + 0.03, 0.40), DARK_WOOD)
        for x in (-0.3, 0.3)
        for y in (-0.65, 0.77)
    ]
    return [*collision_shapes(file.body["coffee_table"], (0.72, 0.70, 0.68)), *legs]


def _steps(start: float, number: int, width: float = 0.6) -> list[float]:
    return [start + i * width for i in range(number)]
