"""Draw a picture of all perturbations: a row for each kind, magnitudes 0 to 5 from left to right.

python -m benchmarks.contact_sheet --assets official --out docs/images/perturbations.jpg
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from command_line import main_guard
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from envs.perturb import KINDS, MAGNITUDES, Perturbation

FRAME_SIDE = 160  # pixels
SEED = 7  # of the perturbations
CAPTION_HEIGHT = 24
MAX_CAPTION = 27  # characters that fit below a frame


def caption(kind: str, magnitude: int, instruction: str) -> str:
    """The text below a frame: kind and magnitude, or the first words of the instruction if the kind changes that."""
    if kind == "language":
        first_words = " ".join(instruction.split()[:4])
        return f"{first_words} ..."
    return f"{kind} {magnitude}"


def draw_sheet(env: LiberoEnv) -> Image.Image:
    """Reset the env once for each kind and magnitude, and put the images of agentview side by side."""
    cell_height = FRAME_SIDE + CAPTION_HEIGHT
    sheet = Image.new("RGB", (FRAME_SIDE * len(MAGNITUDES), cell_height * len(KINDS)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, kind in enumerate(KINDS):
        for column, magnitude in enumerate(MAGNITUDES):
            perturbation = Perturbation(kind, magnitude, SEED)
            observation = env.reset(Start(0, perturbation=perturbation)).observation
            assert observation is not None, "a reset observes unless it is told not to"
            x = column * FRAME_SIDE
            y = row * cell_height
            frame = Image.fromarray(observation.images[0]).resize((FRAME_SIDE, FRAME_SIDE))
            sheet.paste(frame, (x, y))
            text = caption(kind, magnitude, observation.instruction)
            draw.text((x + 2, y + FRAME_SIDE + 2), text[:MAX_CAPTION], fill="black")
    return sheet


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks.contact_sheet", description=__doc__.splitlines()[0])
    parser.add_argument("--assets", default="official")
    parser.add_argument("--out", type=Path, default=Path("perturbations.jpg"))
    arguments = parser.parse_args(argv)
    libero_env = LiberoEnv(EnvSpec("libero_spatial", (0,), num_images=1, assets=arguments.assets), task_id=0)
    draw_sheet(libero_env).save(arguments.out, quality=85)
    libero_env.close()


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.contact_sheet", main))
