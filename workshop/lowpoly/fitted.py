"""Make looks that are fitted to an object's collision boxes: bowls, mugs, packets, books, cans, bottles, baskets.

Each function returns the shapes of one body. `looks.json` names the function and its colours for every object. Lengths
are in metres.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from workshop.lowpoly.facts import Body, collision_shapes, extent
from workshop.lowpoly.shapes import Color, Shape, Vector, box, cylinder, lathe, prism, ring, tube

LABEL_M = 0.0004  # how far a label stands out, so that it hides the surface below
PANEL_M = 0.0006  # how far the bands of a basket stand out
# A quaternion that turns z into y. Cans and most bottles stand along y in their frame, but are built along z.
UPRIGHT = (1, -1, 0, 0)

# The bowl is drawn with these sizes in metres, then stretched to its collision boxes.
BOWL_WIDTH = 0.107
BOWL_HEIGHT = 0.0506
BOWL_OUTSIDE = ((0, 0), (0.026, 0), (0.044, 0.0124), (0.050, 0.0284), (0.0530, 0.0480))
BOWL_RIM = (BOWL_OUTSIDE[-1], (0.0535, 0.0506), (0.0510, 0.0506))
BOWL_INSIDE = ((0.0510, 0.0506), (0.048, 0.0294), (0.0415, 0.0149), (0.025, 0.0052), (0, 0.0052))

# A mug's handle from its upper to its lower end: (distance from the wall, height), as shares of the largest distance
# and of the mug's height.
HANDLE = ((0.0, 0.78), (0.75, 0.77), (1.0, 0.66), (1.0, 0.38), (0.7, 0.24), (0.0, 0.20))


def bowl(body: Body, outside: Color, rim: Color, inside: Color) -> list[Shape]:
    """A round bowl on a foot."""
    low, high = extent(body)
    width = (high[0] - low[0]) / BOWL_WIDTH
    height = (high[2] - low[2]) / BOWL_HEIGHT
    shapes = []
    for profile, color in ((BOWL_OUTSIDE, outside), (BOWL_RIM, rim), (BOWL_INSIDE, inside)):
        shape = lathe(profile, color, segments=24).stretched((width, width, height))
        shapes.append(shape.placed((0, 0, low[2])))
    return shapes


def mug(body: Body, handle: int, foot: float, lower: Color, upper: Color, inside: Color) -> list[Shape]:
    """A mug. `handle`: 1 if the handle points to x, -1 if to -x. `foot`: radius at the bottom / radius at the top."""
    low, high = extent(body)
    bottom = low[2]
    top = high[2]
    height = top - bottom
    mouth_radius = (high[1] - low[1]) / 2
    foot_radius = foot * mouth_radius
    wall = 0.0035
    centre = low[0] + mouth_radius if handle > 0 else high[0] - mouth_radius
    reach = (high[0] if handle > 0 else low[0]) - centre
    split = (foot_radius + 0.9 * (mouth_radius - foot_radius), bottom + 0.45 * height)  # lower | upper colour
    handle_start = handle * (split[0] - wall)
    handle_end = reach - handle * 0.005
    path = [(handle_start + out * (handle_end - handle_start), 0, bottom + up * height) for out, up in HANDLE]
    below = [(0, bottom), (foot_radius, bottom), split]
    above = [split, (mouth_radius, top), (mouth_radius - wall, top)]
    within = [(mouth_radius - wall, top), (foot_radius - wall, bottom + 0.005), (0, bottom + 0.005)]
    shapes = [
        lathe(below, lower, segments=24),
        lathe(above, upper, segments=24),
        lathe(within, inside, segments=24),
        tube(path, 0.005, upper),
    ]
    return [shape.placed((centre, (low[1] + high[1]) / 2, 0)) for shape in shapes]


def sleeve(low: np.ndarray, high: np.ndarray, axis: int, start: float, stop: float, color: Color) -> Shape:
    """A band around a box, from `start` to `stop` (0 to 1) along one of its axes."""
    length = high[axis] - low[axis]
    band_low = low - LABEL_M
    band_high = high + LABEL_M
    band_low[axis] = low[axis] + start * length
    band_high[axis] = low[axis] + stop * length
    return box(band_low, band_high, color)


def label_on(low: np.ndarray, high: np.ndarray, x: Vector, y: Vector, color: Color) -> Shape:
    """A label on the upper and lower face of a flat box; `x` and `y`: where it starts and ends, 0 to 1 of the box."""
    label_low = low + np.array([x[0], y[0], 0]) * (high - low)
    label_high = low + np.array([x[1], y[1], 0]) * (high - low)
    return box((*label_low[:2], low[2] - 2 * LABEL_M), (*label_high[:2], high[2] + 2 * LABEL_M), color)


def packet(body: Body, wrapper: Color, bands: Sequence[tuple], labels: Sequence[tuple]) -> list[Shape]:
    """A flat box with bands (axis, start, stop, colour) around it and labels (x, y, colour) on it."""
    low, high = extent(body)
    shapes = [box(low, high, wrapper)]
    shapes += [sleeve(low, high, *band) for band in bands]
    shapes += [label_on(low, high, *label) for label in labels]
    return shapes


def cookies(body: Body, wrapper: Color, window: Color, biscuit: Color) -> list[Shape]:
    """A packet with a window that shows two biscuits."""
    low, high = extent(body)
    x, _, z = (low + high) / 2
    biscuit_shape = cylinder(0.011, low[2] - 3 * LABEL_M, high[2] + 3 * LABEL_M, biscuit, segments=12)
    return [
        box(low, high, wrapper),
        label_on(low, high, (0.2, 0.8), (0.2, 0.8), window),
        biscuit_shape.placed((x, -0.012, z)),
        biscuit_shape.placed((x, 0.014, z)),
    ]


def book(body: Body, cover: Color, pages: Color, title: Color) -> list[Shape]:
    """A book that stands on its long edge, its spine towards -y."""
    low, high = extent(body)
    board = 0.15 * (high[0] - low[0])  # thickness of the cover
    edge = 0.004  # how far the cover reaches beyond the pages
    pages_low = (low[0] + board, low[1] + edge, low[2] + edge)
    pages_high = (high[0] - board, high[1], high[2] - edge)
    _, y, z = (low + high) / 2
    title_low = (low[0] - LABEL_M, y - 0.03, z + 0.01)
    title_high = (high[0] + LABEL_M, y + 0.03, z + 0.04)
    return [
        box(pages_low, pages_high, pages),
        box(low, (low[0] + board, *high[1:]), cover),
        box((high[0] - board, *low[1:]), high, cover),
        box(low, (high[0], low[1] + edge, high[2]), cover),  # the spine
        box(title_low, title_high, title),
    ]


def can(body: Body, metal: Color, label: Color, band: Color) -> list[Shape]:
    """A tin with a paper label and a stripe around it."""
    low, high = extent(body)
    radius = (high[0] - low[0]) / 2
    bottom = low[1]
    top = high[1]
    height = top - bottom
    lid = top - 0.003
    rim = [(radius, top), (0.9 * radius, top), (0.88 * radius, lid), (0, lid)]
    tin = lathe([(0, bottom), (radius, bottom), *rim], metal)
    paper = ring(radius - 0.002, radius + LABEL_M, bottom + 0.06 * height, top - 0.06 * height, label)
    stripe_outside = radius + 2 * LABEL_M
    stripe = ring(radius - 0.002, stripe_outside, bottom + 0.52 * height, bottom + 0.72 * height, band)
    return upright([tin, paper, stripe], low, high)


def upright(shapes: Sequence[Shape], low: np.ndarray, high: np.ndarray) -> list[Shape]:
    """Turn shapes that are built along z so that they stand along y, and move them to the middle of the extent."""
    middle = ((low[0] + high[0]) / 2, 0, (low[2] + high[2]) / 2)
    return [shape.placed(middle, UPRIGHT) for shape in shapes]


def carton(body: Body, paper: Color, band: Color, roof: Color) -> list[Shape]:
    """A drink in a gable-top carton: a box with two bands, two slopes and the seam on top."""
    low, high = extent(body, slice(0, 1))
    top = extent(body)[1][1]
    seam = 0.0034  # half the thickness of the seam
    slopes = [(high[1], low[2]), (top - 0.003, -seam), (top - 0.003, seam), (high[1], high[2])]
    return [
        box(low, high, paper),
        sleeve(low, high, 1, 0.45, 0.8, band),
        sleeve(low, high, 1, 0.0, 0.12, band),
        prism(slopes, low[0], high[0], roof),
        box((low[0], top - 0.004, -seam), (high[0], top, seam), roof),
    ]


def squeeze_bottle(body: Body, sauce: Color, label: Color, cap: Color) -> list[Shape]:
    """An oval bottle that narrows to a shoulder, with a round cap."""
    low, high = extent(body)
    width = (high[0] - low[0]) / 2
    depth = (high[2] - low[2]) / 2
    bottom = low[1]
    top = high[1]
    foot, waist, chest, shoulder, neck = [
        bottom + share * (top - bottom) for share in (0.05, 0.12, 0.45, 0.62, 0.74)
    ]
    neck_radius = 0.016 / width  # as a share of the bottle's half width
    outline = [(0, bottom), (0.92, bottom), (1, foot), (0.97, chest), (0.8, shoulder)]
    bottle = lathe([*outline, (neck_radius, neck), (0, neck)], sauce)
    sticker = lathe([(0.9, waist), (1.015, waist), (0.99, chest), (0.9, chest), (0.9, waist)], label)
    lid = lathe([(0, neck), (0.0168, neck), (0.0152, top), (0, top)], cap)
    oval = (width, depth, 1)
    return upright([bottle.stretched(oval), sticker.stretched(oval), lid], low, high)


def flat_bottle(body: Body, sauce: Color, label: Color, mark: Color, cap: Color) -> list[Shape]:
    """A flat bottle that stands along z."""
    low, high = extent(body)
    width, depth = (high - low)[:2] / 2
    bottom = low[2]
    shoulder = low[2] + 0.5 * (high[2] - low[2])
    top = high[2]
    neck = top - 0.022
    belly = [(0, bottom), (0.95, bottom), (1, bottom + 0.004), (1, shoulder), (0.62, shoulder + 0.02)]
    shapes = [
        lathe([*belly, (0.5, neck), (0, neck)], sauce),
        ring(0.9, 1.02, bottom + 0.008, shoulder - 0.006, label),
        ring(0.9, 1.03, bottom + 0.02, bottom + 0.03, mark),
        lathe([(0, neck), (0.6, neck), (0.58, top), (0, top)], cap),
    ]
    return [shape.stretched((width, depth, 1)) for shape in shapes]


def basket(body: Body, wicker: Color, dark: Color) -> list[Shape]:
    """A basket: a floor and four walls, with dark bands around the walls."""
    floor = collision_shapes(body, dark, slice(0, 1))
    walls = collision_shapes(body, wicker, slice(1, 5))
    bands = []
    for wall in walls:
        low = wall.vertices.min(0)
        high = wall.vertices.max(0)
        for level in (0.12, 0.32, 0.52, 0.72, 0.94):
            z = low[2] + level * (high[2] - low[2])
            bands.append(box((*(low[:2] - PANEL_M), z), (*(high[:2] + PANEL_M), z + 0.006), dark))
    return [*floor, *walls, *bands]


FITTED_LOOKS: Mapping[str, Callable[..., list[Shape]]] = {
    "bowl": bowl,
    "mug": mug,
    "packet": packet,
    "cookies": cookies,
    "book": book,
    "can": can,
    "carton": carton,
    "squeeze_bottle": squeeze_bottle,
    "flat_bottle": flat_bottle,
    "basket": basket,
}
