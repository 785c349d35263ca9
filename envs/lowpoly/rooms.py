"""What the rooms look like: textures, materials and lights, and furniture that nothing touches.

Tables collide, and are drawn by their collision boxes; backgrounds follow the places and sizes of the original's
meshes. Coordinates are the world's, in metres; the robot looks to x, its back is towards the rear wall at x = -2.
The names of textures are LIBERO's: its arena code picks one by the style that a task asks for.
"""

import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from envs.lowpoly.facts import AssetFile, Look, collision_shapes
from envs.lowpoly.objects import COLORS, LOOKS, drawn
from envs.lowpoly.shapes import Color, Shape, box

# Material, the texture it shows (names that LIBERO's arena code knows) and how much it shines by itself: LIBERO's lamps
# hang straight above, which leaves walls in the dark.
MATERIALS = (("floor", "texplane", 0.0), ("wall", "tex-wall", 0.35), ("table", "tex-table", 0.0))
# Matt, the texture once a metre.
MATT = {"texrepeat": "1 1", "texuniform": "true", "specular": "0", "shininess": "0", "reflectance": "0"}
# The kitchen has a third lamp. At the original's brightness it leaves nothing but white of these plain colours.
LIGHTS = {"light_kitchen": {"diffuse": "0.2 0.2 0.2", "specular": "0.1 0.1 0.1"}}
TEXTURES = LOOKS["textures"]
SIDE = 128  # of textures, in pixels
BOOKS = ((0.55, 0.15, 0.13), (0.16, 0.27, 0.45), (0.80, 0.65, 0.25), (0.20, 0.38, 0.27), (0.12, 0.12, 0.13))


def arena_look(file: AssetFile) -> Look:
    names = [geom.attributes.get("name", "") for body in file.worldbody.walk() for geom in body.geoms]
    paint = {
        name: {"material": name.split("_")[0]}
        for name in names
        if name == "floor" or name.endswith("_visual")
    }
    # The skybox has no name. All other textures are flat: a cube bends straight grain.
    flat = [{"name": name, "type": "2d", "file": file.textures[name]["file"]} for _, name, _ in MATERIALS]
    textures = [("texture", texture) for texture in (file.textures["null"], *flat)]
    materials = [
        ("material", {"name": name, "texture": texture, "emission": glow, **MATT})
        for name, texture, glow in MATERIALS
    ]
    return Look(scenery(file), {**paint, **LIGHTS}, [*textures, *materials])


def scenery(file: AssetFile) -> Mapping[str, Sequence[Shape]]:
    """By name of the body: tables, drawn by their collision boxes, and what stands in the background."""
    wood, stone = COLORS["wood"], (0.72, 0.70, 0.68)
    tables = {"living_room_table_col": wood, "study_table": wood, "coffee_table": stone}
    shapes = {
        name: collision_shapes(file.body[name], color) for name, color in tables.items() if name in file.body
    }
    room = next((room for room in ("kitchen", "living_room", "study") if room in file.name), None)
    if room is not None:
        shelf = [*drawn(LOOKS["backgrounds"]["shelf"]), *books()] if room == "study" else []
        shapes["world"] = [*shelf, *drawn(LOOKS["backgrounds"][room])]
    elif "coffee_table" in shapes:
        shapes["coffee_table"] += drawn(LOOKS["backgrounds"]["coffee_table"])
    return shapes


def books() -> list[Shape]:
    """On four shelves, twelve on each."""
    return [
        box(
            (-1.80, y, z + 0.03),
            (-1.60, y + 0.05, z + 0.27 - 0.02 * (number % 3)),
            BOOKS[number % len(BOOKS)],
        )
        for z in (0.05, 0.45, 0.85, 1.25)
        for number, y in enumerate(-1.5 + i * 0.06 for i in range(12))
    ]


def plaster(rng: np.random.Generator, color: Color, strength: float = 0.03) -> np.ndarray:
    """Fine grain on soft clouds. All patterns return float (SIDE, SIDE, 3), not yet clipped to 0..1."""
    grain = rng.choice([-1.0, 0.0, 1.0], (SIDE, SIDE)) * 0.4 + _clouds(rng, 8)
    return np.asarray(color) * (1 + strength * grain)[..., None]


def tiles(
    rng: np.random.Generator, color: Color, joint: Color = (0.6, 0.6, 0.6), number: int = 2
) -> np.ndarray:
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
    return np.asarray(image.resize((3 * SIDE, 3 * SIDE), Image.Resampling.BICUBIC))[
        SIDE : 2 * SIDE, SIDE : 2 * SIDE
    ]


def texture_png(name: str) -> bytes:
    """The PNG of a name in TEXTURES. Its noise depends on the name alone, so that every machine draws the same."""
    patterns: dict[str, Any] = {f.__name__: f for f in (plaster, tiles, marble, grain, weave)}
    arguments = dict(TEXTURES[name])
    image = patterns[arguments.pop("pattern")](np.random.default_rng(zlib.crc32(name.encode())), **arguments)
    pixels = np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
