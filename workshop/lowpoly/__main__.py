"""Write the low-poly pack, or look at it.

python -m workshop.lowpoly OUT
python -m workshop.lowpoly --preview FOLDER --tasks libero_spatial:0 libero_10:3
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image

from command_line import main_guard, parse_flags
from contracts import BadInput
from workshop.lowpoly import ensure_pack


@dataclass(frozen=True)
class LowpolyArgs:
    """Write the low-poly pack, or look at it."""

    out: tyro.conf.Positional[Path | None] = None
    """Folder that the pack's folder is written into (None: it is not written)."""
    preview: Path | None = None
    """Folder for pictures of the first frame of tasks (None: none is rendered)."""
    tasks: tuple[str, ...] = ("libero_spatial:0", "libero_object:0", "libero_goal:0", "libero_10:3")
    """Tasks of --preview, as SUITE:ID."""


def main(argv: Sequence[str]) -> None:
    arguments = parse_flags(LowpolyArgs, argv, prog="python -m workshop.lowpoly")
    if arguments.out is None and arguments.preview is None:
        raise BadInput("nothing to do: name a folder OUT or --preview FOLDER")
    if arguments.out is not None:
        print(ensure_pack(arguments.out))
    if arguments.preview is not None:
        for task in arguments.tasks:
            print(render_task(task, arguments.preview))


def render_task(task: str, folder: Path) -> Path:
    """Write a picture of a task's first frame: agentview and wrist side by side, as a policy's cameras see them."""
    from envs.libero import EnvSpec, LiberoEnv  # needs the simulator; writing the pack does not

    suite, _, number = task.partition(":")
    if not number.isdigit():
        raise BadInput(f"--tasks: {task!r} is no task; write it as libero_spatial:0")
    env = LiberoEnv(EnvSpec(task_suite=suite, task_ids=(int(number),), num_images=2), int(number))
    observation = env.reset(init_state_id=0).observation
    env.close()
    # Observations are turned by 180 degrees for the policy, which leaves them mirrored: people see them unmirrored.
    picture = np.concatenate([image[:, ::-1] for image in observation.images], axis=1)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{suite}_{number}.png"
    Image.fromarray(picture).save(file)
    return file


if __name__ == "__main__":
    sys.exit(main_guard("workshop.lowpoly", main))
