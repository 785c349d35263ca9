"""Draw the textures of floors, walls and tables from noise: plaster, tiles, marble, wood and cloth.

Their names are LIBERO's, because its arena code chooses a texture by the style that a task names. Every pattern returns
floats (SIDE, SIDE, 3), not yet clipped to 0..1.
"""

import io
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from workshop.lowpoly.objects import LOOKS
from workshop.lowpoly.shapes import Color

TEXTURES = LOOKS["textures"]  # file name -> name of a pattern, and its arguments
SIDE = 128  # side of a texture in pixels


def texture_png(name: str) -> bytes:
    """The PNG file of a texture in TEXTURES. Its noise depends on the name only, so every machine draws the same."""
    arguments = dict(TEXTURES[name])
    pattern = PATTERNS[arguments.pop("pattern")]
    image = pattern(np.random.default_rng(zlib.crc32(name.encode())), **arguments)
    pixels = np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return file.getvalue()


def plaster(rng: np.random.Generator, color: Color, strength: float = 0.03) -> np.ndarray:
    """Plaster: fine grain on soft clouds."""
    roughness = rng.choice([-1.0, 0.0, 1.0], (SIDE, SIDE)) * 0.4 + _clouds(rng, 8)
    return np.asarray(color) * (1 + strength * roughness)[..., None]


def tiles(
    rng: np.random.Generator, color: Color, joint: Color = (0.6, 0.6, 0.6), number: int = 2
) -> np.ndarray:
    """Square tiles of slightly different brightness, `number` along each side, with joints between them."""
    width = SIDE // number
    tint = rng.uniform(-0.03, 0.03, (number, number)).repeat(width, 0).repeat(width, 1)
    image = plaster(rng, color, 0.02) * (1 + tint)[..., None]
    is_joint = np.arange(SIDE) % width < 2
    image[is_joint, :] = joint
    image[:, is_joint] = joint
    return image


def marble(rng: np.random.Generator, color: Color) -> np.ndarray:
    """Marble: thin grey veins where smooth noise changes its sign."""
    veins = np.exp(-((_clouds(rng, 4) / 0.08) ** 2))
    return np.asarray(color) * (1 - 0.15 * veins)[..., None]


def grain(rng: np.random.Generator, color: Color, planks: int = 1) -> np.ndarray:
    """Wood: streaks along the first axis, on planks of slightly different brightness."""
    width = SIDE // planks
    streaks = np.repeat(rng.normal(0, 0.05, (1, SIDE)), SIDE, 0) + 0.03 * _clouds(rng, 8)
    plank_tint = rng.normal(0, 0.04, planks).repeat(width)[None, :]
    image = np.asarray(color) * (1 + streaks + plank_tint)[..., None]
    if planks > 1:
        is_gap = np.arange(SIDE) % width == 0
        image[:, is_gap] *= 0.6
    return image


def weave(rng: np.random.Generator, color: Color) -> np.ndarray:
    """Cloth: threads in both directions."""
    threads = 0.03 * rng.normal(size=(SIDE, 1)) + 0.03 * rng.normal(size=(1, SIDE))
    return np.asarray(color) * (1 + threads)[..., None]


ALL_PATTERNS: Sequence[Callable[..., np.ndarray]] = (plaster, tiles, marble, grain, weave)
PATTERNS = {pattern.__name__: pattern for pattern in ALL_PATTERNS}  # by the names that looks.json uses


def _clouds(rng: np.random.Generator, cells: int) -> np.ndarray:
    """Smooth noise (SIDE, SIDE) of about unit variance, with `cells` blobs a side. Copies join without a seam."""
    knots = rng.normal(size=(cells, cells))
    repeated = Image.fromarray(np.tile(knots, (3, 3)).astype(np.float32))
    enlarged = np.asarray(repeated.resize((3 * SIDE, 3 * SIDE), Image.Resampling.BICUBIC))
    return enlarged[SIDE : 2 * SIDE, SIDE : 2 * SIDE]
