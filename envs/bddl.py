"""Read the instruction of a BDDL file, and refuse numbers that LIBERO would execute.

LIBERO evaluates the numbers of a :yaw_rotation as Python code, so a file of others could execute anything.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from contracts import BadInput, first_line

# What the printed list of a rotation's numbers consists of. No call can be written with it.
NUMBERS = re.compile(r"[-+.0-9e', \[\]]*")


def read_instruction(path: Path) -> str:
    """Check a BDDL file; returns its instruction. Raises BadInput, which names the file and what is wrong in it."""
    # This is LIBERO's own parser. Import it here, because `envs.tasks` is the one to report a missing LIBERO.
    from bddl.parsing import scan_tokens

    if not path.is_file():
        raise BadInput(f"BDDL file {path}: no such file")
    try:
        # Read the file as text: line ends are then the same as for LIBERO.
        expression = scan_tokens(string=path.read_text(encoding="utf-8"))
        (language,) = [part for part in expression if part[0] == ":language"]
        rotations = list(_groups(expression, ":yaw_rotation"))
    except Exception as fault:  # raised by the parser, or where a list is missing
        reason = f"{type(fault).__name__}: {first_line(fault)}"
        raise BadInput(
            f"BDDL file {path}: it cannot be read as one of LIBERO's own files ({reason}); count the parentheses, and "
            "see whether it has one (:language ...)"
        ) from None
    for rotation in rotations:
        if not NUMBERS.fullmatch(str(rotation[1:])):
            raise BadInput(
                f"BDDL file {path}: :yaw_rotation {rotation[1:]} needs plain numbers: LIBERO evaluates them"
            )
    return " ".join(language[1:])


def _groups(expression: list | str, name: str) -> Iterator[list]:
    """All lists that begin with `name`, at any depth of the expression."""
    if isinstance(expression, list):
        if expression[:1] == [name]:
            yield expression
        for part in expression:
            yield from _groups(part, name)
