"""Command lines of all programs of the project: flags from a dataclass, and exit codes."""

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

    `default` replaces the defaults of `kind`. A section (a dataclass within the dataclass) adds no prefix to its flags.
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
    """The message in tyro's error box as one line, without the frame and the hints."""
    lines = [line.strip("│ ") for line in error_box.splitlines() if not re.match(r"[╭╰]|│ ─", line)]
    text = " ".join(" ".join(lines).split())
    return re.split(r"\s*(?:Argument helptext|For full helptext)", text)[0]


def main_guard(program: str, main: Callable[[Sequence[str]], object]) -> int:
    """Run `main(argv)` of a program and return its exit code.

    0: done, or time is up; 2: a problem that the user can repair; 130: interrupted. Other exceptions pass through, so
    that Python prints a traceback and exits with 1.
    """
    # By default PyTorch's threads keep their cores busy while they wait. When another program uses the same cores, this
    # makes an update take 5 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        program += f", rank {os.environ['RANK']}"

    def leave(signal_number: int, frame: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(130)

    # Until `experiment.stopping.interruptible` takes over, either signal ends the program at once.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signal_number) != signal.SIG_IGN:  # a shell's background job ignores SIGINT
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
    except BrokenPipeError:  # the reader of the output has ended (`| head`)
        # Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
