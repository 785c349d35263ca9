"""Write the low-poly pack, and pictures of tasks that show it.

python -m workshop.lowpoly OUT [--preview libero_spatial:0 libero_10:3]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image

from command_line import main_guard, parse_flags
from envs.libero import EnvSpec, LiberoEnv
from workshop.lowpoly import ensure_pack


@dataclass(frozen=True)
class LowpolyArgs:
    """Write the low-poly pack, and pictures of tasks that show it."""

    out: tyro.conf.Positional[Path]
    """Folder that the pack's folder is written into."""
    preview: tuple[str, ...] = ()
    """Tasks, as SUITE:ID, whose first frame is written into OUT, too."""


def main(argv: Sequence[str]) -> None:
    arguments = parse_flags(LowpolyArgs, argv, prog="python -m workshop.lowpoly")
    print(pack := ensure_pack(arguments.out))
    for task in arguments.preview:
        suite, _, number = task.partition(":")
        env = LiberoEnv(EnvSpec(suite, (int(number),), num_images=2, assets=str(pack)), int(number))
        observation = env.reset(init_state_id=0).observation
        env.close()
        # Observations are turned by 180 degrees for the policy, which leaves them mirrored: people see them unmirrored.
        picture = np.concatenate([image[:, ::-1] for image in observation.images], axis=1)
        Image.fromarray(picture).save(arguments.out / f"{suite}_{number}.png")


if __name__ == "__main__":
    sys.exit(main_guard("workshop.lowpoly", main))
