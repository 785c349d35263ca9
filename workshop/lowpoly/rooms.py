"""What the rooms look like: textures, materials and lights, and furniture that nothing touches.

Tables collide, and are drawn by their collision boxes; backgrounds follow the places and sizes of the original's
meshes. Coordinates are the world's, in metres; the robot looks to x, its back is towards the rear wall at x = -2.
The names of textures are LIBERO's: its arena code picks one by the style that a task asks for
(`envs/arenas/style.py` there) and expects to find it in the pack.
"""

import io
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from PIL import Image

from workshop.lowpoly.facts import AssetFile, Look, collision_shapes
from workshop.lowpoly.objects import BLACK, DARK_WOOD, STEEL, WHITE
from workshop.lowpoly.shapes import Color, Shape, box, cylinder, lathe, tube

# Material, the texture it shows (names that LIBERO's arena code knows) and how much it shines by itself: LIBERO's lamps
# hang straight above, which leaves walls in the dark.
MATERIALS = (("floor", "texplane", 0.0), ("wall", "tex-wall", 0.35), ("table", "tex-table", 0.0))
# Matt, the texture once a metre.
MATT = {"texrepeat": "1 1", "texuniform": "true", "specular": "0", "shininess": "0", "reflectance": "0"}
# The kitchen has a third lamp. At the original's brightness it leaves nothing but white of these plain colours.
LIGHTS = {"light_kitchen": {"diffuse": "0.2 0.2 0.2", "specular": "0.1 0.1 0.1"}}
WOOD = (0.50, 0.36, 0.26)
BOOKS = ((0.55, 0.15, 0.13), (0.16, 0.27, 0.45), (0.80, 0.65, 0.25), (0.20, 0.38, 0.27), (0.12, 0.12, 0.13))


def arena_look(file: AssetFile) -> Look:
    names = [geom.name for body in file.worldbody.walk() for geom in body.geoms if geom.name]
    paint = {name: {"material": name.split("_")[0]} for name in names if name == "floor" or name.endswith("_visual")}
    # The skybox has no name. All other textures are flat: a cube bends straight grain.
    flat = [{"name": name, "type": "2d", "file": file.textures[name]["file"]} for _, name, _ in MATERIALS]
    textures = [("texture", texture) for texture in (file.textures["null"], *flat)]
    materials = [
        ("material", {"name": name, "texture": texture, "emission": glow, **MATT}) for name, texture, glow in MATERIALS
    ]
    return Look(scenery(file), {**paint, **LIGHTS}, [*textures, *materials])


def scenery(file: AssetFile) -> Mapping[str, Sequence[Shape]]:
    """By name of the body."""
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


# --------------------------------------------------------------------------------------- textures

SIDE = 128  # pixels

GREY_JOINT = (0.60, 0.60, 0.60)


def plaster(rng: np.random.Generator, color: Color, strength: float = 0.03) -> np.ndarray:
    """Fine grain on soft clouds. All patterns return float (SIDE, SIDE, 3), not yet clipped to 0..1."""
    grain = rng.choice([-1.0, 0.0, 1.0], (SIDE, SIDE)) * 0.4 + _clouds(rng, 8)
    return np.asarray(color) * (1 + strength * grain)[..., None]


def tiles(rng: np.random.Generator, color: Color, joint: Color = GREY_JOINT, number: int = 2) -> np.ndarray:
    """Square tiles of slightly different brightness, divided by joints."""
    tint = rng.uniform(-0.03, 0.03, (number, number)).repeat(SIDE // number, 0).repeat(SIDE // number, 1)
    image = plaster(rng, color, 0.02) * (1 + tint)[..., None]
    in_joint = np.arange(SIDE) % (SIDE // number) < 2
    image[in_joint, :] = joint
    image[:, in_joint] = joint
    return image


def marble(rng: np.random.Generator, color: Color) -> np.ndarray:
    """Thin grey veins: where soft clouds change their sign."""
    veins = np.exp(-((_clouds(rng, 4) / 0.08) ** 2))
    return np.asarray(color) * (1 - 0.15 * veins)[..., None]


def grain(rng: np.random.Generator, color: Color, planks: int = 1) -> np.ndarray:
    """Wood: streaks along the first axis, in planks of slightly different brightness."""
    streaks = np.repeat(rng.normal(0, 0.05, (1, SIDE)), SIDE, 0) + 0.03 * _clouds(rng, 8)
    width = SIDE // planks
    image = np.asarray(color) * (1 + streaks + rng.normal(0, 0.04, planks).repeat(width)[None, :])[..., None]
    if planks > 1:
        image[:, np.arange(SIDE) % width == 0] *= 0.6
    return image


def weave(rng: np.random.Generator, color: Color) -> np.ndarray:
    """Cloth: threads in both directions."""
    threads = 0.03 * rng.normal(size=(SIDE, 1)) + 0.03 * rng.normal(size=(1, SIDE))
    return np.asarray(color) * (1 + threads)[..., None]


def _clouds(rng: np.random.Generator, cells: int) -> np.ndarray:
    """Smooth noise (SIDE, SIDE) of unit size that continues across the edges, `cells` blobs a side."""
    knots = rng.normal(size=(cells, cells))
    image = Image.fromarray(np.tile(knots, (3, 3)).astype(np.float32))
    return np.asarray(image.resize((3 * SIDE, 3 * SIDE), Image.Resampling.BICUBIC))[SIDE : 2 * SIDE, SIDE : 2 * SIDE]


Pattern = Callable[[np.random.Generator], np.ndarray]

TEXTURES: dict[str, Pattern] = {
    # floors
    "dark_floor_texture.png": lambda rng: grain(rng, (0.25, 0.20, 0.17), planks=4),
    "rustic_floor.png": lambda rng: grain(rng, (0.50, 0.36, 0.25), planks=4),
    "light-gray-floor-tile.png": lambda rng: tiles(rng, (0.72, 0.72, 0.71)),
    "white_marble_floor.png": lambda rng: marble(rng, (0.91, 0.91, 0.91)),
    "seamless_wood_planks_floor.png": lambda rng: grain(rng, (0.80, 0.66, 0.45), planks=4),
    "brown_ceramic_tile.png": lambda rng: tiles(rng, (0.55, 0.40, 0.30), joint=(0.35, 0.27, 0.22)),
    "gray_ceramic_tile.png": lambda rng: tiles(rng, (0.60, 0.61, 0.62), joint=(0.45, 0.45, 0.45)),
    "tile_grigia_caldera_porcelain_floor.png": lambda rng: tiles(rng, (0.765, 0.729, 0.695)),
    # walls
    "light_blue_wall.png": lambda rng: plaster(rng, (0.68, 0.80, 0.88)),
    "dark_blue_wall.png": lambda rng: plaster(rng, (0.20, 0.28, 0.42)),
    "dark_gray_plaster.png": lambda rng: plaster(rng, (0.38, 0.38, 0.38)),
    "gray_plaster.png": lambda rng: plaster(rng, (0.58, 0.58, 0.57)),
    "dark_green_plaster_wall.png": lambda rng: plaster(rng, (0.20, 0.33, 0.26)),
    "light-gray-plaster.png": lambda rng: plaster(rng, (0.78, 0.78, 0.77)),
    "smooth_light_gray_plaster.png": lambda rng: plaster(rng, (0.873, 0.857, 0.831)),
    "ceramic.png": lambda rng: plaster(rng, (0.95, 0.95, 0.93), 0.01),
    "white_wall.png": lambda rng: plaster(rng, (0.93, 0.93, 0.92)),
    "yellow_linen_wall_texture.png": lambda rng: weave(rng, (0.84, 0.76, 0.55)),
    "linen_wall_texture.png": lambda rng: weave(rng, (0.82, 0.78, 0.70)),
    "canvas_sky_blue.png": lambda rng: weave(rng, (0.448, 0.691, 0.822)),
    # table tops
    "martin_novak_wood_table.png": lambda rng: grain(rng, (0.775, 0.707, 0.634)),
}


def texture_png(name: str) -> bytes:
    """The PNG of a name in TEXTURES. Its noise depends on the name alone, so that every machine draws the same."""
    image = TEXTURES[name](np.random.default_rng(zlib.crc32(name.encode())))
    pixels = np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
