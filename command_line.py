"""What every program of the project does with its command line: flags from a dataclass, and exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

from contracts import BadInput, TimeIsUp

T = TypeVar("T")


def parse_flags(kind: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    """Read `argv` (without the program's name) as an instance of the dataclass `kind`. Raises BadInput.

    The flags of a section, a dataclass within the dataclass, have no prefix.
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    error_box = io.StringIO()
    try:
        with contextlib.redirect_stderr(error_box):
            return tyro.cli(kind, args=list(argv), prog=prog, config=(tyro.conf.OmitArgPrefixes,), **options)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        raise BadInput(f"{_first_sentence(error_box.getvalue())} (see --help)") from None


def _first_sentence(error_box: str) -> str:
    """What tyro's error box says, in one line without its frame and its hints."""
    lines = [line.strip("│ ") for line in error_box.splitlines() if not re.match(r"[╭╰]|│ ─", line)]
    text = " ".join(" ".join(lines).split())
    return re.split(r"\s*(?:Argument helptext|For full helptext)", text)[0]


def main_guard(program: str, main: Callable[[Sequence[str]], object]) -> int:
    """Run `main(argv)` of a program; returns 0 (done, time is up), 2 (the user can repair it) or 130 (interrupted)."""
    # PyTorch's threads wait for one another actively: beside another busy program an update takes 5 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        program += f", rank {os.environ['RANK']}"

    def leave(signal_number: int, frame: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(130)

    # Until `interruptible` takes over, either signal ends the program.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signal_number) != signal.SIG_IGN:  # as SIGINT is in a shell's background job
            signal.signal(signal_number, leave)
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BadInput as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        return 2
    except TimeIsUp as reason:
        print(f"{program}: {reason}")
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads the output any more (`| head`): no complaint at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
