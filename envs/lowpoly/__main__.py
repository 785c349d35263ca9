"""Write the low-poly pack, or look at it.

python -m envs.lowpoly OUT
python -m envs.lowpoly --preview FOLDER --tasks libero_spatial:0 libero_10:3
"""

import argparse
import sys
from pathlib import Path

from envs.lowpoly import ensure_pack
from errors import BadInput

PREVIEW_TASKS = ["libero_spatial:0", "libero_object:0", "libero_goal:0", "libero_10:3"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.lowpoly", description=__doc__.splitlines()[0])
    parser.add_argument(
        "out", nargs="?", type=Path, metavar="OUT", help="folder that the pack's folder is written into"
    )
    parser.add_argument("--preview", type=Path, metavar="FOLDER", help="render the first frame of tasks into a folder")
    parser.add_argument("--tasks", nargs="+", default=PREVIEW_TASKS, metavar="SUITE:ID", help="tasks of --preview")
    arguments = parser.parse_args()
    if arguments.out is None and arguments.preview is None:
        parser.error("nothing to do: name a folder OUT or --preview FOLDER")
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
    try:
        main()
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
