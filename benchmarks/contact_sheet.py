"""A picture of every perturbation: kinds below one another, magnitudes 0 to 5 from left to right.

python -m benchmarks.contact_sheet --assets official --out docs/images/perturbations.jpg
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from envs.env import EnvSpec
from envs.libero import LiberoEnv
from envs.perturb import KINDS, MAGNITUDES, Perturbation

SIDE, LINES = 160, 24  # pixels of a frame, and of the sentence below it

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--task-suite", default="libero_spatial")
parser.add_argument("--task-id", type=int, default=0)
parser.add_argument("--init-state", type=int, default=0)
parser.add_argument("--seed", type=int, default=7)
parser.add_argument("--assets", default="official")
parser.add_argument("--out", type=Path, default=Path("perturbations.jpg"))
arguments = parser.parse_args()
env = LiberoEnv(EnvSpec(arguments.task_suite, (arguments.task_id,), 1, arguments.assets), arguments.task_id)
sheet = Image.new("RGB", (SIDE * len(MAGNITUDES), (SIDE + LINES) * len(KINDS)), "white")
for row, kind in enumerate(KINDS):
    for magnitude in MAGNITUDES:
        change = Perturbation(kind, magnitude, arguments.seed)
        seen = env.reset(arguments.init_state, perturbation=change).observation
        assert seen is not None
        x, y, words = magnitude * SIDE, row * (SIDE + LINES), seen.instruction.split()
        sheet.paste(Image.fromarray(np.asarray(seen.images[0])).resize((SIDE, SIDE)), (x, y))
        text = f"{kind} {magnitude}" if kind not in ("language", "task") else " ".join(words[:4]) + " ..."
        ImageDraw.Draw(sheet).text((x + 2, y + SIDE + 2), text[:27], fill="black")
sheet.save(arguments.out, quality=85)
env.close()
