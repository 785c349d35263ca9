"""Packages: cartons, boxes, cans and bottles, with labels in colours near those of the products.

Boxes lie flat. Cans, cartons and most bottles stand along y in their own frame, LIBERO turns them upright; they are
built along z here and turned by UPRIGHT.
"""

import numpy as np

from envs.lowpoly.facts import AssetFile
from envs.lowpoly.fitting import extent
from envs.lowpoly.mjcf import Look
from envs.lowpoly.palette import (
    BLACK,
    BLUE,
    BROWN,
    CREAM,
    DARK_RED,
    LIGHT_BLUE,
    ORANGE,
    RED,
    TAN,
    TIN,
    WHITE,
    YELLOW,
    Color,
)
from envs.lowpoly.shapes import Shape, Vector, box, cylinder, lathe, prism, ring

UPRIGHT = (1, -1, 0, 0)  # turns z into y
SKIN = 0.0004  # metres by which a label stands out, so that it hides what is below


# ------------------------------------------------------------------------------------------------ flat boxes


def sleeve(low: Vector, high: Vector, axis: int, start: float, stop: float, color: Color) -> Shape:
    """A band around a box, from `start` to `stop` (0 to 1) along one of its axes."""
    low, high = np.array(low, float), np.array(high, float)
    length = high[axis] - low[axis]
    band_low, band_high = low - SKIN, high + SKIN
    band_low[axis], band_high[axis] = low[axis] + start * length, low[axis] + stop * length
    return box(band_low, band_high, color)


def patch(low: Vector, high: Vector, x: Vector, y: Vector, color: Color) -> Shape:
    """A label on the upper and lower face of a flat box, `x` and `y` from 0 to 1 across it."""
    low, high = np.array(low, float), np.array(high, float)
    size = high - low
    return box(
        (low[0] + x[0] * size[0], low[1] + y[0] * size[1], low[2] - 2 * SKIN),
        (low[0] + x[1] * size[0], low[1] + y[1] * size[1], high[2] + 2 * SKIN),
        color,
    )


def cream_cheese(file: AssetFile) -> Look:
    low, high = extent(file.body["object"])
    label = patch(low, high, (0.15, 0.85), (0.25, 0.75), WHITE)
    return Look({"object": [box(low, high, LIGHT_BLUE), sleeve(low, high, 0, 0.3, 0.7, BLUE), label]})


def butter(file: AssetFile) -> Look:
    low, high = extent(file.body["object"])
    label = patch(low, high, (0.2, 0.8), (0.3, 0.7), RED)
    return Look({"object": [box(low, high, YELLOW), sleeve(low, high, 0, 0.85, 0.97, TAN), label]})


def chocolate_pudding(file: AssetFile) -> Look:
    low, high = extent(file.body["object"])
    label = patch(low, high, (0.1, 0.55), (0.2, 0.8), WHITE)
    return Look({"object": [box(low, high, BROWN), sleeve(low, high, 0, 0.7, 0.82, CREAM), label]})


def cookies(file: AssetFile) -> Look:
    low, high = extent(file.body["object"])
    middle = (low + high) / 2
    biscuits = [
        cylinder(0.011, low[2] - 3 * SKIN, high[2] + 3 * SKIN, BROWN, segments=12).placed((middle[0], y, middle[2]))
        for y in (-0.012, 0.014)
    ]
    window = patch(low, high, (0.2, 0.8), (0.2, 0.8), CREAM)
    return Look({"object": [box(low, high, (0.62, 0.17, 0.12)), window, *biscuits]})


def macaroni_and_cheese(file: AssetFile) -> Look:
    low, high = extent(file.body["object"])
    label = patch(low, high, (0.2, 0.8), (0.15, 0.5), YELLOW)
    return Look({"object": [box(low, high, ORANGE), sleeve(low, high, 1, 0.6, 0.85, BLUE), label]})


def popcorn(file: AssetFile) -> Look:
    low, high = extent(file.body["object"])
    stripes = [sleeve(low, high, 0, start, start + 0.14, RED) for start in (0.05, 0.43, 0.81)]
    return Look({"object": [box(low, high, WHITE), *stripes]})


def book(file: AssetFile, cover: Color, title: Color) -> Look:
    """Stands on its long edge, spine to -y."""
    low, high = extent(file.body["object"])
    leaf, edge = 0.15 * (high[0] - low[0]), 0.004
    pages = box((low[0] + leaf, low[1] + edge, low[2] + edge), (high[0] - leaf, high[1], high[2] - edge), CREAM)
    boards = [box(low, (low[0] + leaf, *high[1:]), cover), box((high[0] - leaf, *low[1:]), high, cover)]
    spine = box(low, (high[0], low[1] + edge, high[2]), cover)
    middle = (low + high) / 2
    label = box(
        (low[0] - SKIN, middle[1] - 0.03, middle[2] + 0.01), (high[0] + SKIN, middle[1] + 0.03, middle[2] + 0.04), title
    )
    return Look({"object": [pages, *boards, spine, label]})


# ------------------------------------------------------------------------------------- cans, cartons, bottles


def can(file: AssetFile, label: Color, band: Color) -> Look:
    low, high = extent(file.body["object"])
    radius, bottom, top = (high[0] - low[0]) / 2, low[1], high[1]
    height, lid = top - bottom, top - 0.003
    shapes = [
        lathe([(0, bottom), (radius, bottom), (radius, top), (0.9 * radius, top), (0.88 * radius, lid), (0, lid)], TIN),
        ring(radius - 0.002, radius + SKIN, bottom + 0.06 * height, top - 0.06 * height, label),
        ring(radius - 0.002, radius + 2 * SKIN, bottom + 0.52 * height, bottom + 0.72 * height, band),
    ]
    centre = ((low[0] + high[0]) / 2, 0, (low[2] + high[2]) / 2)
    return Look({"object": [shape.placed(centre, UPRIGHT) for shape in shapes]})


def carton(file: AssetFile, body: Color, band: Color, roof: Color) -> Look:
    """A drink in a gable-top carton: box, two slopes and the seam on top."""
    low, high = extent(file.body["object"], slice(0, 1))
    top = extent(file.body["object"])[1][1]
    seam = 0.0034
    slopes = [(high[1], low[2]), (top - 0.003, -seam), (top - 0.003, seam), (high[1], high[2])]
    shapes = [
        box(low, high, body),
        sleeve(low, high, 1, 0.45, 0.8, band),
        sleeve(low, high, 1, 0.0, 0.12, band),
        prism([(y, z) for y, z in slopes], 0, low[0], high[0], roof),
        box((low[0], top - 0.004, -seam), (high[0], top, seam), roof),
    ]
    return Look({"object": shapes})


def squeeze_bottle(file: AssetFile, sauce: Color, label: Color, cap: Color) -> Look:
    """An oval bottle that narrows to a shoulder, with a round cap."""
    (name,) = (name for name, body in file.body.items() if body.collision_boxes)
    low, high = extent(file.body[name])
    width, depth = (high[0] - low[0]) / 2, (high[2] - low[2]) / 2
    bottom, top = low[1], high[1]
    foot, waist, chest, shoulder, neck = (bottom + part * (top - bottom) for part in (0.05, 0.12, 0.45, 0.62, 0.74))
    slim = 0.016 / width  # radius of neck and cap, as a part of the bottle's
    profile = [(0, bottom), (0.92, bottom), (1, foot), (0.97, chest), (0.8, shoulder), (slim, neck), (0, neck)]
    bottle = lathe(profile, sauce).stretched((width, depth, 1))
    edge = [(0.9, waist), (1.015, waist), (0.99, chest), (0.9, chest), (0.9, waist)]
    sticker = lathe(edge, label).stretched((width, depth, 1))
    lid = lathe([(0, neck), (0.0168, neck), (0.0152, top), (0, top)], cap)
    centre = ((low[0] + high[0]) / 2, 0, (low[2] + high[2]) / 2)
    return Look({name: [shape.placed(centre, UPRIGHT) for shape in (bottle, sticker, lid)]})


def bbq_sauce(file: AssetFile) -> Look:
    """A flat bottle that stands along z."""
    low, high = extent(file.body["object"])
    wide, flat = (high - low)[:2] / 2
    bottom, shoulder, top = low[2], low[2] + 0.5 * (high[2] - low[2]), high[2]
    neck = top - 0.022
    body = [(0, bottom), (0.95, bottom), (1, bottom + 0.004), (1, shoulder), (0.62, shoulder + 0.02)]
    bottle = lathe([*body, (0.5, neck), (0, neck)], (0.26, 0.08, 0.03))
    label = ring(0.9, 1.02, bottom + 0.008, shoulder - 0.006, (0.90, 0.62, 0.15))
    mark = ring(0.9, 1.03, bottom + 0.02, bottom + 0.03, DARK_RED)
    cap = lathe([(0, neck), (0.6, neck), (0.58, top), (0, top)], BLACK)
    return Look({"object": [shape.stretched((wide, flat, 1)) for shape in (bottle, label, mark, cap)]})
