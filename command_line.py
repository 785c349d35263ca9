"""What all command lines of the project share: flags from a dataclass, exit codes, answers before heavy imports.

A command line is a frozen dataclass whose field docstrings are the text of `--help`, and `main(argv)`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

from errors import BadInput, TimeIsUp
from interrupts import give_up_broken_stdout, interruptible
from quick_imports import begin_imports, end_imports

T = TypeVar("T")


def parse_flags(kind: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    """`argv` as an instance of the dataclass `kind`; tyro's error boxes become BadInput. Exits on --help."""
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            if default is None:
                return tyro.cli(kind, args=list(argv), prog=prog)
            return tyro.cli(kind, args=list(argv), prog=prog, default=default)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        raise BadInput(_in_one_line(messages.getvalue())) from None


def answer_at_once(program: str, parse: Callable[[Sequence[str]], object]) -> None:
    """Exit on --help (0) and on flags that make no sense (2). What follows are imports, up to `main_guard`."""
    code = main_guard(program, parse)
    if code != 0:
        sys.exit(code)
    begin_imports()


def main_guard(program: str, main: Callable[[Sequence[str]], object]) -> int:
    """Run a command line's `main(argv)` and return its exit code: 2 and one line for what the user can repair.

    The first Ctrl-C or SIGTERM stops it in good order (130), a second one at once. Time that is up is a good end (0).
    """
    end_imports()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        program += f", rank {os.environ['RANK']}"
    try:
        with interruptible():
            main(sys.argv[1:])
    except BadInput as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        return 2
    except TimeIsUp as reason:
        print(f"{program}: {reason}")
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    finally:
        give_up_broken_stdout()
    return 0


def _in_one_line(box: str) -> str:
    """The sentence inside tyro's drawn error box, without its title and the flag's help text."""
    lines = [line.strip("│ ") for line in box.splitlines() if not re.match(r"[╭╰]|│ ─", line)]
    text = re.sub(r"\s+", " ", " ".join(lines))
    return re.split(r"\s*(?:Argument helptext|For full helptext)", text)[0] + " (see --help)"
