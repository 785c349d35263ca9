"""Write the low-poly pack, or look at it.

python -m envs.lowpoly OUT
python -m envs.lowpoly --preview FOLDER --tasks libero_spatial:0 libero_10:3
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from command_line import main_guard, parse_flags
from envs.lowpoly import ensure_pack
from errors import BadInput


@dataclass(frozen=True)
class LowpolyArgs:
    """Write the low-poly pack, or look at it."""

    out: tyro.conf.Positional[Path | None] = None
    """Folder that the pack's folder is written into (None: it is not written)."""
    preview: Path | None = None
    """Folder to render the first frame of tasks into (None: none is rendered)."""
    tasks: tuple[str, ...] = ("libero_spatial:0", "libero_object:0", "libero_goal:0", "libero_10:3")
    """Tasks of --preview, as SUITE:ID."""


def main(argv: Sequence[str]) -> None:
    arguments = parse_flags(LowpolyArgs, argv, prog="python -m envs.lowpoly")
    if arguments.out is None and arguments.preview is None:
        raise BadInput("nothing to do: name a folder OUT or --preview FOLDER")
    if arguments.out is not None:
        print(ensure_pack(arguments.out))
    if arguments.preview is not None:
        from envs.lowpoly.preview import render_tasks  # needs the simulator; writing the pack does not

        for picture in render_tasks([_task(text) for text in arguments.tasks], arguments.preview):
            print(picture)


def _task(text: str) -> tuple[str, int]:
    task_suite, _, task_id = text.partition(":")
    if not task_id.isdigit():
        raise BadInput(f"--tasks: {text!r} is no task; write it as libero_spatial:0")
    return task_suite, int(task_id)


if __name__ == "__main__":
    sys.exit(main_guard("envs.lowpoly", main))
