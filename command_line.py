"""Command lines of all programs of the project: flags from a dataclass, exit codes, and signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeVar

try:
    import tyro
except ModuleNotFoundError as error:  # most often a Python that is not the environment's
    advice = "`source .venv/bin/activate` first; `make venv` makes .venv"
    print(f"{sys.argv[0]}: {sys.executable} has no {error.name}: {advice}", file=sys.stderr)
    raise SystemExit(2) from None

from contracts import BadInput, TimeIsUp

T = TypeVar("T")
# On time.perf_counter's clock. Every program imports this file first, before what takes seconds to import.
PROGRAM_STARTED = time.perf_counter()

# Signals that ask a program to stop: Ctrl-C, the end of a job, the end of the terminal, Slurm's --signal=USR1@90, and
# the limit of CPU time.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)


def parse_flags(
    kind: type[T], argv: Sequence[str], prog: str, default: T | None = None, description: str | None = None
) -> T:
    """Read `argv` (without the program's name) as an instance of the dataclass `kind`. Wrong flags exit with code 2.

    `default` replaces the defaults of `kind`. `description`: the first lines of --help (None: the docstring of `kind`).
    A section (a dataclass within the dataclass) adds no prefix to its flags. The comments above fields are their help.
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(
        kind, args=argv, prog=prog, description=description, config=(tyro.conf.OmitArgPrefixes,), **options
    )


def main_guard(program: str, main: Callable[[Sequence[str]], object], knows_ranks: bool = False) -> int:
    """Run `main(argv)` of a program and return its exit code.

    knows_ranks: whether several processes of it can work together. Others would all write the same files.

    0: done, or time is up; 2: a problem that the user can repair; 130: interrupted. Other exceptions pass through, so
    that Python prints a traceback and exits with 1.
    """
    complete_environment()
    if "RANK" in os.environ:
        program += f", rank {os.environ['RANK']}"
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if num_ranks != "1" and not knows_ranks:
        print(
            f"{program}: knows no ranks, but WORLD_SIZE is {num_ranks}: start it without torchrun",
            file=sys.stderr,
        )
        return 2
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":  # names of files, and texts in them, would be misread
        print(f"{program}: the locale's encoding is {encoding}: set LC_ALL=C.UTF-8", file=sys.stderr)
        return 2
    handle_stop_signals(partial(_leave, program))
    try:
        main(sys.argv[1:])
    except BadInput as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        return 2
    except TimeIsUp as reason:
        print(f"{program}: {reason}")
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        # A simulator that was being built cannot be taken apart; Python would print a traceback for it.
        sys.unraisablehook = lambda fault: None
        return 130
    except BrokenPipeError:  # the reader of the output has ended (`--help | head`)
        # Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def complete_environment() -> None:
    """Set what containers leave out of the environment."""
    # By default PyTorch's threads keep their cores busy while they wait. When another program uses the same cores, this
    # makes an update take 5 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Some containers and service managers do not set HOME, which wandb needs. Without it and without an entry in passwd
    # libraries would make a folder named ~, and torch, which asks for the user's name, would fail.
    home = os.path.expanduser("~")
    os.environ["HOME"] = "/nonexistent" if home == "~" else home
    os.environ.setdefault("LOGNAME", f"user-{os.getuid()}")
    # A process that is alone loses the variables of ranks, which some clusters set.
    if os.environ.get("WORLD_SIZE", "1") == "1":
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


def _leave(program: str, signal_number: int, frame: object) -> None:
    """End the program at once; `experiment.interrupts.interruptible` takes over while a run must be closed."""
    os.write(2, f"{program}: interrupted\n".encode())
    os._exit(130)


def stop_handlers() -> dict[signal.Signals, Any]:
    """The handlers of STOP_SIGNALS, without ignored signals.

    An ignored signal stays ignored: a shell's background job ignores SIGINT, a program under nohup SIGHUP.
    """
    handlers = {stop_signal: signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS}
    return {stop_signal: handler for stop_signal, handler in handlers.items() if handler != signal.SIG_IGN}


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let `handler` answer the signals of `stop_handlers`."""
    for stop_signal in stop_handlers():
        signal.signal(stop_signal, handler)
