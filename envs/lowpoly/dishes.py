"""Bowls, plate, ramekin, mugs, pan, pot and wine bottle: mostly surfaces of revolution."""

from envs.lowpoly.facts import AssetFile
from envs.lowpoly.fitting import extent
from envs.lowpoly.mjcf import Look
from envs.lowpoly.palette import RED, WHITE, Color
from envs.lowpoly.shapes import Vector, cylinder, lathe, ring, tube


def bowl(file: AssetFile, outside: Color, rim: Color, inside: Color) -> Look:
    """A round bowl on a foot, drawn for 107 mm of width and 51 mm of height and stretched to what it shall be."""
    outer = [(0, 0), (0.026, 0), (0.044, 0.0124), (0.050, 0.0284), (0.0530, 0.0480)]
    edge = [outer[-1], (0.0535, 0.0506), (0.0510, 0.0506)]
    inner = [(0.0510, 0.0506), (0.048, 0.0294), (0.0415, 0.0149), (0.025, 0.0052), (0, 0.0052)]
    low, high = extent(file.body["object"])
    width, height = (high[0] - low[0]) / 0.107, (high[2] - low[2]) / 0.0506
    parts = ((outer, outside), (edge, rim), (inner, inside))
    shapes = [lathe(profile, color, segments=24).stretched((width, width, height)) for profile, color in parts]
    return Look({"object": [shape.placed((0, 0, low[2])) for shape in shapes]})


def plate(file: AssetFile) -> Look:
    """White with a red line on the rim."""
    below = [(0, -0.0025), (0.034, -0.0025), (0.0690, 0.0125), (0.0690, 0.0162)]
    rim = [(0.0690, 0.0162), (0.0625, 0.0148)]
    line = [(0.0625, 0.0148), (0.0570, 0.0127)]
    above = [(0.0570, 0.0127), (0.034, 0.0045), (0, 0.0045)]
    shapes = [lathe(part, WHITE, segments=28) for part in (below, rim, above)]
    return Look({"object": [*shapes, lathe(line, RED, segments=28)]})


def ramekin(file: AssetFile) -> Look:
    """A small straight dish, grey-blue outside with a dark glazed rim."""
    wall = [(0, 0.0007), (0.036, 0.0007), (0.0385, 0.004), (0.0438, 0.0375)]
    rim = [(0.0438, 0.0375), (0.0444, 0.0427), (0.0405, 0.0427), (0.0398, 0.0375)]
    inner = [(0.0398, 0.0375), (0.0355, 0.0075), (0, 0.0075)]
    return Look(
        {
            "object": [
                lathe(wall, (0.60, 0.66, 0.72), segments=24),
                lathe(rim, (0.22, 0.25, 0.30), segments=24),
                lathe(inner, (0.86, 0.87, 0.86), segments=24),
            ]
        }
    )


def mug(file: AssetFile, handle: int, foot: float, lower: Color, upper: Color, inside: Color) -> Look:
    """A mug with its handle towards x (`handle` 1) or -x (-1); `foot` is its radius below as a part of that above."""
    low, high = extent(file.body["object"])
    bottom, top = low[2], high[2]
    mouth = (high[1] - low[1]) / 2
    centre = low[0] + mouth if handle > 0 else high[0] - mouth
    reach = (high[0] if handle > 0 else low[0]) - centre
    foot, wall = foot * mouth, 0.0035
    split, middle = bottom + 0.45 * (top - bottom), foot + 0.9 * (mouth - foot)
    shapes = [
        lathe([(0, bottom), (foot, bottom), (middle, split)], lower, segments=24),
        lathe([(middle, split), (mouth, top), (mouth - wall, top)], upper, segments=24),
        lathe([(mouth - wall, top), (foot - wall, bottom + 0.005), (0, bottom + 0.005)], inside, segments=24),
        tube(_handle(handle * (middle - wall), reach - handle * 0.005, bottom, top), 0.005, upper),
    ]
    return Look({"object": [shape.placed((centre, (low[1] + high[1]) / 2, 0)) for shape in shapes]})


def _handle(near: float, far: float, bottom: float, top: float) -> list[Vector]:
    """The path of a handle from x = `near` out to x = `far` and back."""
    outline = ((0.0, 0.78), (0.75, 0.77), (1.0, 0.66), (1.0, 0.38), (0.7, 0.24), (0.0, 0.20))
    return [(near + out * (far - near), 0, bottom + up * (top - bottom)) for out, up in outline]


def frypan(file: AssetFile) -> Look:
    """A black pan, grey inside, its handle towards x."""
    black, grey = (0.09, 0.09, 0.10), (0.27, 0.27, 0.28)
    shell = lathe([(0, 0.0008), (0.082, 0.0008), (0.100, 0.0424), (0.0965, 0.0424)], black, segments=28)
    inside = lathe([(0.0965, 0.0424), (0.080, 0.006), (0, 0.006)], grey, segments=28)
    handle = [(0.096, 0, 0.024), (0.13, 0, 0.033), (0.19, 0, 0.045), (0.259, 0, 0.053)]
    pan = [part.stretched((1.02, 1.02, 1)).placed((0.007, -0.001, 0)) for part in (shell, inside)]
    return Look({"object": [*pan, tube(handle, 0.009, black).stretched((1, 1.3, 1))]})


def moka_pot(file: AssetFile) -> Look:
    """Eight-sided aluminium, waisted, with a spout to -y and a black handle to y."""
    metal, bright, black = (0.66, 0.66, 0.67), (0.80, 0.80, 0.81), (0.10, 0.10, 0.10)
    boiler = lathe([(0, -0.066), (0.0405, -0.066), (0.031, -0.004), (0, -0.004)], metal, segments=8)
    belt = cylinder(0.034, -0.004, 0.006, bright, segments=16)
    jug = lathe([(0, 0.006), (0.030, 0.006), (0.0395, 0.062), (0, 0.062)], metal, segments=8)
    lid = lathe([(0, 0.062), (0.0395, 0.062), (0.006, 0.072), (0, 0.072)], bright, segments=8)
    knob = cylinder(0.006, 0.071, 0.0857, black, segments=10)
    spout = tube([(0, -0.03, 0.03), (0, -0.050, 0.06)], 0.008, metal)
    handle = [(0, 0.034, 0.058), (0, 0.072, 0.062), (0, 0.086, 0.050), (0, 0.072, 0.008), (0, 0.060, -0.008)]
    return Look({"object": [boiler, belt, jug, lid, knob, spout, tube(handle, 0.0062, black)]})


def wine_bottle(file: AssetFile) -> Look:
    glass, paper, cork = (0.04, 0.13, 0.05), (0.86, 0.82, 0.70), (0.78, 0.58, 0.36)
    body = [(0, 0.0011), (0.0207, 0.0011), (0.0214, 0.004), (0.0214, 0.074)]
    neck = [(0.017, 0.085), (0.0085, 0.097), (0.0076, 0.104), (0.0076, 0.148), (0, 0.148)]
    bottle = lathe([*body, *neck], glass)
    label = ring(0.019, 0.0218, 0.016, 0.058, paper)
    mark = ring(0.019, 0.0221, 0.034, 0.044, (0.55, 0.08, 0.12))
    return Look({"object": [bottle, label, mark, cylinder(0.0066, 0.148, 0.158, cork, segments=12)]})
