"""What each object looks like, by `looks.json`: a list of parts for each body, or one of the functions here, which fit
a kind of object to its collision boxes. Colours are names of its `colors`, or numbers.

A new object needs its facts in `facts.json`; without a line in `looks.json` it is drawn as plain boxes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.lowpoly.facts import AssetFile, Body, Look, collision_shapes, extent, plain_look
from envs.lowpoly.shapes import Color, Shape, Vector, box, cylinder, lathe, prism, ring, tube

LOOKS = json.loads(Path(__file__).with_name("looks.json").read_text(encoding="utf-8"))
COLORS: Mapping[str, Color] = {name: tuple(color) for name, color in LOOKS["colors"].items()}
MAKERS: Mapping[str, Callable[..., Shape]] = {
    make.__name__: make for make in (box, lathe, cylinder, ring, tube)
}
LABEL = 0.0004  # metres by which a label stands out, so that it hides what is below
PANEL = 0.0006  # likewise the bands of a basket
UPRIGHT = (
    1,
    -1,
    0,
    0,
)  # turns z into y: cans and most bottles stand along y in their frame, and are built along z


def object_look(file: AssetFile) -> Look:
    if file.name not in LOOKS["objects"]:
        return plain_look(file)
    look = {key: _colored(value) for key, value in LOOKS["objects"][file.name].items()}
    if "bodies" in look:
        shapes = {name: drawn(parts, file.body[name]) for name, parts in look["bodies"].items()}
        return Look(shapes, look.get("paint", {}))
    (body,) = (body for body in file.body.values() if body.collision_boxes)
    return Look({body.name: FITTED[look.pop("look")](body, **look)})


def _colored(value: Any) -> Any:
    """A value of looks.json, the names of colours replaced."""
    if isinstance(value, list):
        return tuple(map(_colored, value))
    return (
        {key: _colored(part) for key, part in value.items()}
        if isinstance(value, dict)
        else COLORS.get(value, value)
    )


def drawn(parts: Sequence[Mapping[str, Any]], body: Body | None = None) -> list[Shape]:
    """A maker with its arguments (boxes also in a row, `along_y` metres apart), or the body's own collision boxes."""
    shapes = []
    for part in map(_colored, parts):
        if part["make"] == "own_boxes":
            assert body is not None, "a background has none"
            shapes += collision_shapes(body, part["color"], slice(*part["args"]))
            continue
        options = {"segments": part["segments"]} if "segments" in part else {}
        rows = [part["args"]]
        for i in range(1, part.get("times", 1)):
            rows.append([(x, y + i * part["along_y"], z) for x, y, z in part["args"]])
        for arguments in rows:
            shape = MAKERS[part["make"]](*arguments, color=part["color"], **options)
            shape = shape.stretched(part["stretched"]) if "stretched" in part else shape
            shapes.append(shape.placed(part["at"]) if "at" in part else shape)
    return shapes


def bowl(body: Body, outside: Color, rim: Color, inside: Color) -> list[Shape]:
    """A round bowl on a foot, drawn for 107 mm of width and 51 mm of height and stretched to what it shall be."""
    outer = [(0, 0), (0.026, 0), (0.044, 0.0124), (0.050, 0.0284), (0.0530, 0.0480)]
    edge = [outer[-1], (0.0535, 0.0506), (0.0510, 0.0506)]
    inner = [(0.0510, 0.0506), (0.048, 0.0294), (0.0415, 0.0149), (0.025, 0.0052), (0, 0.0052)]
    low, high = extent(body)
    width, height = (high[0] - low[0]) / 0.107, (high[2] - low[2]) / 0.0506
    parts = ((outer, outside), (edge, rim), (inner, inside))
    shapes = [
        lathe(profile, color, segments=24).stretched((width, width, height)) for profile, color in parts
    ]
    return [shape.placed((0, 0, low[2])) for shape in shapes]


def mug(body: Body, handle: int, foot: float, lower: Color, upper: Color, inside: Color) -> list[Shape]:
    """A mug with its handle towards x (`handle` 1) or -x (-1); `foot` is its radius below as a part of that above."""
    low, high = extent(body)
    bottom, top = low[2], high[2]
    mouth = (high[1] - low[1]) / 2
    centre = low[0] + mouth if handle > 0 else high[0] - mouth
    reach = (high[0] if handle > 0 else low[0]) - centre
    foot, wall = foot * mouth, 0.0035
    split, middle = bottom + 0.45 * (top - bottom), foot + 0.9 * (mouth - foot)
    near, far = handle * (middle - wall), reach - handle * 0.005
    outline = ((0.0, 0.78), (0.75, 0.77), (1.0, 0.66), (1.0, 0.38), (0.7, 0.24), (0.0, 0.20))  # of the handle
    path = [(near + out * (far - near), 0, bottom + up * (top - bottom)) for out, up in outline]
    shapes = [
        lathe([(0, bottom), (foot, bottom), (middle, split)], lower, segments=24),
        lathe([(middle, split), (mouth, top), (mouth - wall, top)], upper, segments=24),
        lathe([(mouth - wall, top), (foot - wall, bottom + 0.005), (0, bottom + 0.005)], inside, segments=24),
        tube(path, 0.005, upper),
    ]
    return [shape.placed((centre, (low[1] + high[1]) / 2, 0)) for shape in shapes]


def sleeve(low: np.ndarray, high: np.ndarray, axis: int, start: float, stop: float, color: Color) -> Shape:
    """A band around a box, from `start` to `stop` (0 to 1) along one of its axes."""
    band_low, band_high, length = low - LABEL, high + LABEL, high[axis] - low[axis]
    band_low[axis], band_high[axis] = low[axis] + start * length, low[axis] + stop * length
    return box(band_low, band_high, color)


def patch(low: np.ndarray, high: np.ndarray, x: Vector, y: Vector, color: Color) -> Shape:
    """A label on the upper and lower face of a flat box, `x` and `y` from 0 to 1 across it."""
    corners = [low + np.array([x[end], y[end], 0]) * (high - low) for end in (0, 1)]
    return box((*corners[0][:2], low[2] - 2 * LABEL), (*corners[1][:2], high[2] + 2 * LABEL), color)


def packet(body: Body, wrapper: Color, bands: Sequence[tuple], labels: Sequence[tuple]) -> list[Shape]:
    """A flat box with bands (axis, start, stop, colour) around it and labels (x, y, colour) on it."""
    low, high = extent(body)
    around, on_top = (
        [sleeve(low, high, *band) for band in bands],
        [patch(low, high, *label) for label in labels],
    )
    return [box(low, high, wrapper), *around, *on_top]


def cookies(body: Body, wrapper: Color, window: Color, biscuit: Color) -> list[Shape]:
    low, high = extent(body)
    x, _, z = (low + high) / 2
    round_ = cylinder(0.011, low[2] - 3 * LABEL, high[2] + 3 * LABEL, biscuit, segments=12)
    biscuits = [round_.placed((x, y, z)) for y in (-0.012, 0.014)]
    return [box(low, high, wrapper), patch(low, high, (0.2, 0.8), (0.2, 0.8), window), *biscuits]


def book(body: Body, cover: Color, pages: Color, title: Color) -> list[Shape]:
    """Stands on its long edge, spine to -y."""
    low, high = extent(body)
    leaf, edge = 0.15 * (high[0] - low[0]), 0.004
    block = box(
        (low[0] + leaf, low[1] + edge, low[2] + edge), (high[0] - leaf, high[1], high[2] - edge), pages
    )
    boards = [box(low, (low[0] + leaf, *high[1:]), cover), box((high[0] - leaf, *low[1:]), high, cover)]
    spine = box(low, (high[0], low[1] + edge, high[2]), cover)
    _, y, z = (low + high) / 2
    label = box((low[0] - LABEL, y - 0.03, z + 0.01), (high[0] + LABEL, y + 0.03, z + 0.04), title)
    return [block, *boards, spine, label]


def can(body: Body, metal: Color, label: Color, band: Color) -> list[Shape]:
    low, high = extent(body)
    radius, bottom, top = (high[0] - low[0]) / 2, low[1], high[1]
    height, lid = top - bottom, top - 0.003
    rim = [(radius, top), (0.9 * radius, top), (0.88 * radius, lid), (0, lid)]
    tin = lathe([(0, bottom), (radius, bottom), *rim], metal)
    paper = ring(radius - 0.002, radius + LABEL, bottom + 0.06 * height, top - 0.06 * height, label)
    stripe = ring(radius - 0.002, radius + 2 * LABEL, bottom + 0.52 * height, bottom + 0.72 * height, band)
    return upright([tin, paper, stripe], low, high)


def upright(shapes: list[Shape], low: np.ndarray, high: np.ndarray) -> list[Shape]:
    return [shape.placed(((low[0] + high[0]) / 2, 0, (low[2] + high[2]) / 2), UPRIGHT) for shape in shapes]


def carton(body: Body, paper: Color, band: Color, roof: Color) -> list[Shape]:
    """A drink in a gable-top carton: box, two slopes and the seam on top."""
    low, high = extent(body, slice(0, 1))
    top, seam = extent(body)[1][1], 0.0034
    slopes = [(high[1], low[2]), (top - 0.003, -seam), (top - 0.003, seam), (high[1], high[2])]
    bands = [sleeve(low, high, 1, start, stop, band) for start, stop in ((0.45, 0.8), (0.0, 0.12))]
    gable = prism(slopes, low[0], high[0], roof)
    return [
        box(low, high, paper),
        *bands,
        gable,
        box((low[0], top - 0.004, -seam), (high[0], top, seam), roof),
    ]


def squeeze_bottle(body: Body, sauce: Color, label: Color, cap: Color) -> list[Shape]:
    """An oval bottle that narrows to a shoulder, with a round cap."""
    low, high = extent(body)
    width, depth = (high[0] - low[0]) / 2, (high[2] - low[2]) / 2
    bottom, top = low[1], high[1]
    foot, waist, chest, shoulder, neck = (
        bottom + part * (top - bottom) for part in (0.05, 0.12, 0.45, 0.62, 0.74)
    )
    slim = 0.016 / width  # radius of neck and cap, as a part of the bottle's
    profile = [
        (0, bottom),
        (0.92, bottom),
        (1, foot),
        (0.97, chest),
        (0.8, shoulder),
        (slim, neck),
        (0, neck),
    ]
    bottle = lathe(profile, sauce).stretched((width, depth, 1))
    edge = [(0.9, waist), (1.015, waist), (0.99, chest), (0.9, chest), (0.9, waist)]
    sticker = lathe(edge, label).stretched((width, depth, 1))
    return upright(
        [bottle, sticker, lathe([(0, neck), (0.0168, neck), (0.0152, top), (0, top)], cap)], low, high
    )


def flat_bottle(body: Body, sauce: Color, label: Color, mark: Color, cap: Color) -> list[Shape]:
    """Stands along z."""
    low, high = extent(body)
    wide, flat = (high - low)[:2] / 2
    bottom, shoulder, top = low[2], low[2] + 0.5 * (high[2] - low[2]), high[2]
    neck = top - 0.022
    belly = [(0, bottom), (0.95, bottom), (1, bottom + 0.004), (1, shoulder), (0.62, shoulder + 0.02)]
    shapes = [
        lathe([*belly, (0.5, neck), (0, neck)], sauce),
        ring(0.9, 1.02, bottom + 0.008, shoulder - 0.006, label),
        ring(0.9, 1.03, bottom + 0.02, bottom + 0.03, mark),
        lathe([(0, neck), (0.6, neck), (0.58, top), (0, top)], cap),
    ]
    return [shape.stretched((wide, flat, 1)) for shape in shapes]


def basket(body: Body, wicker: Color, dark: Color) -> list[Shape]:
    """Floor, four walls, dark bands around it."""
    walls = collision_shapes(body, wicker, slice(1, 5))
    bands = []
    for wall in walls:
        low, high = wall.vertices.min(0), wall.vertices.max(0)
        for level in (0.12, 0.32, 0.52, 0.72, 0.94):
            z = low[2] + level * (high[2] - low[2])
            bands.append(box((*(low[:2] - PANEL), z), (*(high[:2] + PANEL), z + 0.006), dark))
    return [*collision_shapes(body, dark, slice(0, 1)), *walls, *bands]


FITTED: Mapping[str, Callable[..., list[Shape]]] = {
    look.__name__: look
    for look in (bowl, mug, packet, cookies, book, can, carton, squeeze_bottle, flat_bottle, basket)
}
