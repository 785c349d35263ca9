"""What each object looks like. The tables at the end are what to change when one shall look different.

A new object needs its facts in `facts.json`; without a line here it is drawn as plain boxes.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from workshop.lowpoly.facts import AssetFile, Body, Look, collision_shapes, extent, plain_look
from workshop.lowpoly.shapes import Color, Shape, Vector, box, cylinder, lathe, prism, ring, tube

WHITE = (0.93, 0.93, 0.91)
SHADED_WHITE = (0.80, 0.83, 0.86)
CREAM = (0.93, 0.86, 0.68)
YELLOW = (0.95, 0.80, 0.20)
ORANGE = (0.95, 0.50, 0.08)
RED = (0.75, 0.10, 0.08)
DARK_RED = (0.45, 0.05, 0.05)
GREEN = (0.15, 0.48, 0.20)
BLUE = (0.12, 0.28, 0.68)
LIGHT_BLUE = (0.62, 0.68, 0.80)
BROWN = (0.30, 0.16, 0.09)
BLACK = (0.07, 0.07, 0.07)
TIN = (0.72, 0.73, 0.75)
STEEL = (0.70, 0.71, 0.73)
DARK_STEEL = (0.30, 0.31, 0.33)
TAN = (0.80, 0.64, 0.44)
WICKER = (0.66, 0.46, 0.24)
DARK_WICKER = (0.47, 0.31, 0.15)
DARK_WOOD = (0.33, 0.22, 0.15)
MAHOGANY = (0.38, 0.13, 0.07)

LABEL = 0.0004  # metres by which a label stands out, so that it hides what is below
PANEL = 0.0006  # likewise the panels and keys of furniture
UPRIGHT = (1, -1, 0, 0)  # turns z into y: cans and most bottles stand along y in their frame, and are built along z


# ---------------------------------------------------------------------------- dishes: surfaces of revolution


def bowl(body: Body, outside: Color, rim: Color, inside: Color) -> list[Shape]:
    """A round bowl on a foot, drawn for 107 mm of width and 51 mm of height and stretched to what it shall be."""
    outer = [(0, 0), (0.026, 0), (0.044, 0.0124), (0.050, 0.0284), (0.0530, 0.0480)]
    edge = [outer[-1], (0.0535, 0.0506), (0.0510, 0.0506)]
    inner = [(0.0510, 0.0506), (0.048, 0.0294), (0.0415, 0.0149), (0.025, 0.0052), (0, 0.0052)]
    low, high = extent(body)
    width, height = (high[0] - low[0]) / 0.107, (high[2] - low[2]) / 0.0506
    parts = ((outer, outside), (edge, rim), (inner, inside))
    shapes = [lathe(profile, color, segments=24).stretched((width, width, height)) for profile, color in parts]
    return [shape.placed((0, 0, low[2])) for shape in shapes]


def plate(body: Body) -> list[Shape]:
    """White with a red line on the rim."""
    below = [(0, -0.0025), (0.034, -0.0025), (0.0690, 0.0125), (0.0690, 0.0162)]
    rim = [(0.0690, 0.0162), (0.0625, 0.0148)]
    line = [(0.0625, 0.0148), (0.0570, 0.0127)]
    above = [(0.0570, 0.0127), (0.034, 0.0045), (0, 0.0045)]
    return [*(lathe(part, WHITE, segments=28) for part in (below, rim, above)), lathe(line, RED, segments=28)]


def ramekin(body: Body) -> list[Shape]:
    """A small straight dish, grey-blue outside with a dark glazed rim."""
    wall = [(0, 0.0007), (0.036, 0.0007), (0.0385, 0.004), (0.0438, 0.0375)]
    rim = [(0.0438, 0.0375), (0.0444, 0.0427), (0.0405, 0.0427), (0.0398, 0.0375)]
    inner = [(0.0398, 0.0375), (0.0355, 0.0075), (0, 0.0075)]
    parts = ((wall, (0.60, 0.66, 0.72)), (rim, (0.22, 0.25, 0.30)), (inner, (0.86, 0.87, 0.86)))
    return [lathe(profile, color, segments=24) for profile, color in parts]


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


def frypan(body: Body) -> list[Shape]:
    """A black pan, grey inside, its handle towards x."""
    black, grey = (0.09, 0.09, 0.10), (0.27, 0.27, 0.28)
    shell = lathe([(0, 0.0008), (0.082, 0.0008), (0.100, 0.0424), (0.0965, 0.0424)], black, segments=28)
    inside = lathe([(0.0965, 0.0424), (0.080, 0.006), (0, 0.006)], grey, segments=28)
    handle = [(0.096, 0, 0.024), (0.13, 0, 0.033), (0.19, 0, 0.045), (0.259, 0, 0.053)]
    pan = [part.stretched((1.02, 1.02, 1)).placed((0.007, -0.001, 0)) for part in (shell, inside)]
    return [*pan, tube(handle, 0.009, black).stretched((1, 1.3, 1))]


def moka_pot(body: Body) -> list[Shape]:
    """Eight-sided aluminium, waisted, with a spout to -y and a black handle to y."""
    metal, bright, black = (0.66, 0.66, 0.67), (0.80, 0.80, 0.81), (0.10, 0.10, 0.10)
    boiler = lathe([(0, -0.066), (0.0405, -0.066), (0.031, -0.004), (0, -0.004)], metal, segments=8)
    belt = cylinder(0.034, -0.004, 0.006, bright, segments=16)
    jug = lathe([(0, 0.006), (0.030, 0.006), (0.0395, 0.062), (0, 0.062)], metal, segments=8)
    lid = lathe([(0, 0.062), (0.0395, 0.062), (0.006, 0.072), (0, 0.072)], bright, segments=8)
    knob = cylinder(0.006, 0.071, 0.0857, black, segments=10)
    spout = tube([(0, -0.03, 0.03), (0, -0.050, 0.06)], 0.008, metal)
    handle = [(0, 0.034, 0.058), (0, 0.072, 0.062), (0, 0.086, 0.050), (0, 0.072, 0.008), (0, 0.060, -0.008)]
    return [boiler, belt, jug, lid, knob, spout, tube(handle, 0.0062, black)]


def wine_bottle(body: Body) -> list[Shape]:
    glass, paper, cork = (0.04, 0.13, 0.05), (0.86, 0.82, 0.70), (0.78, 0.58, 0.36)
    belly = [(0, 0.0011), (0.0207, 0.0011), (0.0214, 0.004), (0.0214, 0.074)]
    neck = [(0.017, 0.085), (0.0085, 0.097), (0.0076, 0.104), (0.0076, 0.148), (0, 0.148)]
    label = ring(0.019, 0.0218, 0.016, 0.058, paper)
    mark = ring(0.019, 0.0221, 0.034, 0.044, (0.55, 0.08, 0.12))
    return [lathe([*belly, *neck], glass), label, mark, cylinder(0.0066, 0.148, 0.158, cork, segments=12)]


# ------------------------------------------------------------------------- groceries: labels as on the products


def sleeve(low: np.ndarray, high: np.ndarray, axis: int, start: float, stop: float, color: Color) -> Shape:
    """A band around a box, from `start` to `stop` (0 to 1) along one of its axes."""
    length = high[axis] - low[axis]
    band_low, band_high = low - LABEL, high + LABEL
    band_low[axis], band_high[axis] = low[axis] + start * length, low[axis] + stop * length
    return box(band_low, band_high, color)


def patch(low: np.ndarray, high: np.ndarray, x: Vector, y: Vector, color: Color) -> Shape:
    """A label on the upper and lower face of a flat box, `x` and `y` from 0 to 1 across it."""
    size = high - low
    return box(
        (low[0] + x[0] * size[0], low[1] + y[0] * size[1], low[2] - 2 * LABEL),
        (low[0] + x[1] * size[0], low[1] + y[1] * size[1], high[2] + 2 * LABEL),
        color,
    )


def packet(body: Body, wrapper: Color, band: tuple, label: tuple) -> list[Shape]:
    """A flat box with a band (axis, start, stop, colour) around it and a label (x, y, colour) on it."""
    low, high = extent(body)
    return [box(low, high, wrapper), sleeve(low, high, *band), patch(low, high, *label)]


def cookies(body: Body) -> list[Shape]:
    low, high = extent(body)
    middle = (low + high) / 2
    biscuits = [
        cylinder(0.011, low[2] - 3 * LABEL, high[2] + 3 * LABEL, BROWN, segments=12).placed((middle[0], y, middle[2]))
        for y in (-0.012, 0.014)
    ]
    return [box(low, high, (0.62, 0.17, 0.12)), patch(low, high, (0.2, 0.8), (0.2, 0.8), CREAM), *biscuits]


def popcorn(body: Body) -> list[Shape]:
    low, high = extent(body)
    return [box(low, high, WHITE), *(sleeve(low, high, 0, start, start + 0.14, RED) for start in (0.05, 0.43, 0.81))]


def book(body: Body, cover: Color, title: Color) -> list[Shape]:
    """Stands on its long edge, spine to -y."""
    low, high = extent(body)
    leaf, edge = 0.15 * (high[0] - low[0]), 0.004
    pages = box((low[0] + leaf, low[1] + edge, low[2] + edge), (high[0] - leaf, high[1], high[2] - edge), CREAM)
    boards = [box(low, (low[0] + leaf, *high[1:]), cover), box((high[0] - leaf, *low[1:]), high, cover)]
    spine = box(low, (high[0], low[1] + edge, high[2]), cover)
    _, y, z = (low + high) / 2
    return [
        pages,
        *boards,
        spine,
        box((low[0] - LABEL, y - 0.03, z + 0.01), (high[0] + LABEL, y + 0.03, z + 0.04), title),
    ]


def can(body: Body, label: Color, band: Color) -> list[Shape]:
    low, high = extent(body)
    radius, bottom, top = (high[0] - low[0]) / 2, low[1], high[1]
    height, lid = top - bottom, top - 0.003
    shapes = [
        lathe([(0, bottom), (radius, bottom), (radius, top), (0.9 * radius, top), (0.88 * radius, lid), (0, lid)], TIN),
        ring(radius - 0.002, radius + LABEL, bottom + 0.06 * height, top - 0.06 * height, label),
        ring(radius - 0.002, radius + 2 * LABEL, bottom + 0.52 * height, bottom + 0.72 * height, band),
    ]
    return upright(shapes, low, high)


def upright(shapes: list[Shape], low: np.ndarray, high: np.ndarray) -> list[Shape]:
    return [shape.placed(((low[0] + high[0]) / 2, 0, (low[2] + high[2]) / 2), UPRIGHT) for shape in shapes]


def carton(body: Body, paper: Color, band: Color, roof: Color) -> list[Shape]:
    """A drink in a gable-top carton: box, two slopes and the seam on top."""
    low, high = extent(body, slice(0, 1))
    top, seam = extent(body)[1][1], 0.0034
    slopes = [(high[1], low[2]), (top - 0.003, -seam), (top - 0.003, seam), (high[1], high[2])]
    bands = [sleeve(low, high, 1, start, stop, band) for start, stop in ((0.45, 0.8), (0.0, 0.12))]
    gable = prism(slopes, 0, low[0], high[0], roof)
    return [box(low, high, paper), *bands, gable, box((low[0], top - 0.004, -seam), (high[0], top, seam), roof)]


def squeeze_bottle(body: Body, sauce: Color, label: Color, cap: Color) -> list[Shape]:
    """An oval bottle that narrows to a shoulder, with a round cap."""
    low, high = extent(body)
    width, depth = (high[0] - low[0]) / 2, (high[2] - low[2]) / 2
    bottom, top = low[1], high[1]
    foot, waist, chest, shoulder, neck = (bottom + part * (top - bottom) for part in (0.05, 0.12, 0.45, 0.62, 0.74))
    slim = 0.016 / width  # radius of neck and cap, as a part of the bottle's
    profile = [(0, bottom), (0.92, bottom), (1, foot), (0.97, chest), (0.8, shoulder), (slim, neck), (0, neck)]
    bottle = lathe(profile, sauce).stretched((width, depth, 1))
    edge = [(0.9, waist), (1.015, waist), (0.99, chest), (0.9, chest), (0.9, waist)]
    sticker = lathe(edge, label).stretched((width, depth, 1))
    return upright([bottle, sticker, lathe([(0, neck), (0.0168, neck), (0.0152, top), (0, top)], cap)], low, high)


def bbq_sauce(body: Body) -> list[Shape]:
    """A flat bottle that stands along z."""
    low, high = extent(body)
    wide, flat = (high - low)[:2] / 2
    bottom, shoulder, top = low[2], low[2] + 0.5 * (high[2] - low[2]), high[2]
    neck = top - 0.022
    belly = [(0, bottom), (0.95, bottom), (1, bottom + 0.004), (1, shoulder), (0.62, shoulder + 0.02)]
    bottle = lathe([*belly, (0.5, neck), (0, neck)], (0.26, 0.08, 0.03))
    label = ring(0.9, 1.02, bottom + 0.008, shoulder - 0.006, (0.90, 0.62, 0.15))
    mark = ring(0.9, 1.03, bottom + 0.02, bottom + 0.03, DARK_RED)
    cap = lathe([(0, neck), (0.6, neck), (0.58, top), (0, top)], BLACK)
    return [shape.stretched((wide, flat, 1)) for shape in (bottle, label, mark, cap)]


# ---------------------------------------------------------------- furniture: mostly its own collision boxes


def basket(body: Body) -> list[Shape]:
    """A wicker basket: floor, four walls, dark bands around it."""
    walls = collision_shapes(body, WICKER, slice(1, 5))
    bands = []
    for wall in walls:
        low, high = wall.vertices.min(0), wall.vertices.max(0)
        for level in (0.12, 0.32, 0.52, 0.72, 0.94):
            z = low[2] + level * (high[2] - low[2])
            bands.append(box((*(low[:2] - PANEL), z), (*(high[:2] + PANEL), z + 0.006), DARK_WICKER))
    return [*collision_shapes(body, DARK_WICKER, slice(0, 1)), *walls, *bands]


def wine_rack(body: Body) -> list[Shape]:
    """Two sloping shelves of light wood with stops on a dark stand."""
    parts = ((TAN, slice(0, 2)), ((0.35, 0.55, 0.70), slice(2, 4)), (MAHOGANY, slice(4, None)))
    return [shape for color, boxes in parts for shape in collision_shapes(body, color, boxes)]


def wooden_tray(body: Body) -> list[Shape]:
    low, high = extent(body)
    floor = box((*(low[:2] + 0.006), 0.004), (*(high[:2] - 0.006), 0.0078), (0.72, 0.52, 0.30))
    return [*collision_shapes(body, (0.45, 0.28, 0.14)), floor]


def cabinet(file: AssetFile, frame: Color, front: Color, handle: Color) -> Look:
    """Three drawers that open to -y; of a drawer's collision boxes the last three are its handle."""
    shapes = {"base": collision_shapes(file.body["base"], frame)}
    for name in ("cabinet_top", "cabinet_middle", "cabinet_bottom"):
        drawer = file.body[name]
        low, high = extent(drawer, slice(0, 1))
        panel = box((low[0], low[1] - PANEL, low[2] + 0.002), (high[0], high[1], high[2] - 0.002), front)
        trough = collision_shapes(drawer, frame, slice(1, 6))
        shapes[name] = [panel, *trough, *collision_shapes(drawer, handle, slice(6, 9))]
    return Look(shapes)


def flat_stove(file: AssetFile) -> Look:
    """A steel block with three rings on a dark plate; LIBERO shows a red disc between them while it is on."""
    plate = cylinder(0.078, 0.019, 0.0212, (0.19, 0.19, 0.20), segments=24)
    rings = [ring(inner, inner + 0.008, 0.02, 0.0252, (0.38, 0.38, 0.40), 24) for inner in (0.018, 0.038, 0.057)]
    button = file.body["button"]
    low, high = extent(button, slice(14, 18))
    dial = lathe([(0, 0.0004), (0.046, 0.0004), (0.044, 0.0128), (0, 0.0128)], BLACK).placed((0.0013, 0.0044, 0))
    grip = collision_shapes(button, (0.16, 0.16, 0.17), slice(14, 18))
    middle = (low[0] + high[0]) / 2
    mark = box((middle - 0.003, high[1] - 0.03, high[2] - 0.002), (middle + 0.003, high[1], high[2] + PANEL), WHITE)
    return Look({"burner": [plate, *rings], "button": [dial, *grip, mark]}, {"base_vis": {"rgba": (*STEEL, 1.0)}})


def microwave(file: AssetFile) -> Look:
    """Steel case, keys on the right of the door, whose window is dark. It opens to -y."""
    case = collision_shapes(file.body["object"], DARK_STEEL)
    front = -0.1105 - PANEL
    display = box((0.10, front, 0.145), (0.16, -0.10, 0.168), (0.15, 0.75, 0.45))
    places = [(x, z) for x in (0.10, 0.123, 0.146) for z in (0.035, 0.06, 0.085, 0.11)]
    keys = [box((x, front, z), (x + 0.014, -0.10, z + 0.014), STEEL) for x, z in places]
    door = collision_shapes(file.body["microdoorroot"], (0.45, 0.46, 0.48))
    window = box((0.035, -0.025 - PANEL, -0.065), (0.215, -0.001 + PANEL, 0.065), BLACK)
    bar = box((0.2315, -0.064, -0.07), (0.2435, -0.050, 0.07), STEEL)
    bolts = [box((0.233, -0.052, z - 0.006), (0.242, -0.024, z + 0.006), STEEL) for z in (-0.06, 0.06)]
    return Look({"object": [*case, display, *keys], "microdoorroot": [*door, window, bar, *bolts]})


ONE_BODY: dict[str, Callable[[Body], list[Shape]]] = {
    "akita_black_bowl": partial(bowl, outside=(0.05, 0.05, 0.06), rim=(0.32, 0.32, 0.34), inside=(0.13, 0.13, 0.14)),
    "white_bowl": partial(bowl, outside=WHITE, rim=WHITE, inside=SHADED_WHITE),
    "red_bowl": partial(bowl, outside=RED, rim=WHITE, inside=(0.85, 0.25, 0.20)),
    "plate": plate,
    "glazed_rim_porcelain_ramekin": ramekin,
    "porcelain_mug": partial(mug, handle=-1, foot=0.65, lower=WHITE, upper=WHITE, inside=SHADED_WHITE),
    "red_coffee_mug": partial(mug, handle=1, foot=0.87, lower=RED, upper=RED, inside=CREAM),
    "white_yellow_mug": partial(mug, handle=1, foot=0.78, lower=YELLOW, upper=WHITE, inside=YELLOW),
    "chefmate_8_frypan": frypan,
    "moka_pot": moka_pot,
    "wine_bottle": wine_bottle,
    "alphabet_soup": partial(can, label=CREAM, band=ORANGE),
    "tomato_sauce": partial(can, label=RED, band=GREEN),
    "milk": partial(carton, paper=WHITE, band=RED, roof=WHITE),
    "orange_juice": partial(carton, paper=ORANGE, band=YELLOW, roof=GREEN),
    "ketchup": partial(squeeze_bottle, sauce=RED, label=WHITE, cap=WHITE),
    "salad_dressing": partial(squeeze_bottle, sauce=(0.62, 0.72, 0.42), label=CREAM, cap=GREEN),
    "new_salad_dressing": partial(squeeze_bottle, sauce=(0.88, 0.88, 0.78), label=GREEN, cap=BLACK),
    "bbq_sauce": bbq_sauce,
    "butter": partial(packet, wrapper=YELLOW, band=(0, 0.85, 0.97, TAN), label=((0.2, 0.8), (0.3, 0.7), RED)),
    "cream_cheese": partial(
        packet, wrapper=LIGHT_BLUE, band=(0, 0.3, 0.7, BLUE), label=((0.15, 0.85), (0.25, 0.75), WHITE)
    ),
    "chocolate_pudding": partial(
        packet, wrapper=BROWN, band=(0, 0.7, 0.82, CREAM), label=((0.1, 0.55), (0.2, 0.8), WHITE)
    ),
    "macaroni_and_cheese": partial(
        packet, wrapper=ORANGE, band=(1, 0.6, 0.85, BLUE), label=((0.2, 0.8), (0.15, 0.5), YELLOW)
    ),
    "cookies": cookies,
    "popcorn": popcorn,
    "black_book": partial(book, cover=(0.08, 0.08, 0.09), title=DARK_RED),
    "yellow_book": partial(book, cover=YELLOW, title=BLACK),
    "basket": basket,
    "wine_rack": wine_rack,
    "wooden_tray": wooden_tray,
    "wooden_two_layer_shelf": partial(collision_shapes, color=DARK_WOOD),
    "wooden_shelf": partial(collision_shapes, color=DARK_WOOD),
    "desk_caddy": partial(collision_shapes, color=TAN),
}
SEVERAL_BODIES: dict[str, Callable[[AssetFile], Look]] = {
    "wooden_cabinet": partial(cabinet, frame=(0.31, 0.21, 0.14), front=(0.52, 0.35, 0.22), handle=STEEL),
    "white_cabinet": partial(cabinet, frame=(0.80, 0.80, 0.79), front=WHITE, handle=DARK_STEEL),
    "flat_stove": flat_stove,
    "microwave": microwave,
}


def object_look(file: AssetFile) -> Look:
    if file.name in ONE_BODY:
        (body,) = (body for body in file.body.values() if body.collision_boxes)
        return Look({body.name: ONE_BODY[file.name](body)})
    return SEVERAL_BODIES.get(file.name, plain_look)(file)
