"""Procedural textures of floors, walls and table tops.

The file names are LIBERO's: its arena code picks one by the style that a task asks for (`envs/arenas/style.py` there)
and expects to find it in the pack.
"""

import io
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

from envs.lowpoly.palette import Color

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
