"""Command lines of all programs of the project: flags from a dataclass, and exit codes."""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, TextIO, TypeVar, get_type_hints

try:
    import docstring_parser  # comes with tyro
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
# One of these is set in a process that torchrun or accelerate has started.
SET_BY_LAUNCHERS = {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}
PARENT = os.getppid()
AFTER_PARENT = """
import contextlib, os, select, sys
with contextlib.suppress(OSError):  # it has ended
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [], 60)
print(sys.argv[2], file=sys.stderr)
"""


def parse_flags(
    kind: type[T], argv: Sequence[str], prog: str, default: T | None = None, description: str | None = None
) -> T:
    """Read `argv` (without the program's name) as an instance of the dataclass `kind`. Raises BadInput.

    `default` replaces the defaults of `kind`. `description`: the first lines of --help (None: the docstring of `kind`).
    A section (a dataclass within the dataclass) adds no prefix to its flags.
    Lists may have commas (`--task-ids 0,1,2`), and switches a value (`--curriculum=True`), as sweeps write them.
    """
    options: dict[str, Any] = {"description": description}
    if default is not None:
        options["default"] = default
    words = _plain_words(argv, _annotations(kind))
    if not {"-h", "--help"}.isdisjoint(words):
        _join_lines_of_help(kind)
    error_box = io.StringIO()
    try:
        with contextlib.redirect_stderr(error_box):
            return tyro.cli(kind, args=words, prog=prog, config=(tyro.conf.OmitArgPrefixes,), **options)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        raise BadInput(f"{_first_sentence(error_box.getvalue())} (see --help)") from None


def _join_lines_of_help(kind: type) -> None:
    """Give tyro the help of each field as one line: it would break lines where the source does."""
    documented = docstring_parser.parse_from_object(kind).params
    texts = {entry.arg_name: " ".join((entry.description or "").split()) for entry in documented}
    annotations = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(annotations[field.name]):
            _join_lines_of_help(annotations[field.name])
        elif field.name in texts:
            field.metadata = MappingProxyType({**field.metadata, "help": texts[field.name]})


def _annotations(kind: type) -> dict[str, Any]:
    """Flag -> type, for the fields of a dataclass and of the dataclasses within it."""
    annotations: dict[str, Any] = {}
    for name, annotation in get_type_hints(kind).items():
        if isinstance(annotation, type) and is_dataclass(annotation):
            annotations |= _annotations(annotation)
        else:
            annotations[f"--{name.replace('_', '-')}"] = annotation
    return annotations


def _plain_words(argv: Sequence[str], annotations: dict[str, Any]) -> list[str]:
    """A command line as tyro reads it: switches without values, lists without commas."""
    words: list[str] = []
    flag = ""  # to which a word without one belongs
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            flag = name.replace("_", "-")
        has_value = equals and name.startswith("--")  # otherwise the = belongs to the word, as in a path
        text = value if has_value else word
        is_switch = annotations.get(flag) is bool
        is_list = "tuple" in str(annotations.get(flag))
        is_list_of_integers = re.fullmatch(r"-?\d+(,-?\d+)+", text) and flag not in annotations  # a synonym's
        if is_switch and text.lower() in ("true", "false"):
            if not has_value:  # `--curriculum true`: the last word was the switch
                words.pop()
            words.append(flag if text.lower() == "true" else f"--no-{flag.removeprefix('--')}")
        elif (is_list and re.fullmatch(r"[\w.+-]+(,[\w.+-]+)+", text)) or is_list_of_integers:
            words += [name, *text.split(",")] if has_value else text.split(",")
        else:
            words.append(word)
    return words


def _first_sentence(error_box: str) -> str:
    """The message in tyro's error box as one line, without the frame and the hints; of similar flags only the names."""
    lines = [line.strip("│ ") for line in error_box.splitlines() if not re.match(r"[╭╰]|│ ─", line)]
    text = " ".join(" ".join(lines).split())
    text = re.split(r"\s*(?:Argument helptext|For full helptext)", text)[0]
    text = re.sub(r"\[/?bold\]", "", text)  # markup that tyro leaves in some messages
    problem, hint, _ = text.partition(" Perhaps you meant:")
    similar = [line.split()[0].strip(",") for line in lines if line.startswith("--")]
    return f"{problem}: perhaps you meant {' or '.join(similar)}" if hint else problem


def main_guard(program: str, main: Callable[[Sequence[str]], object]) -> int:
    """Run `main(argv)` of a program and return its exit code.

    0: done, or time is up; 2: a problem that the user can repair; 130: interrupted. Other exceptions pass through, so
    that Python prints a traceback and exits with 1.
    """
    open_closed_streams()
    try:
        complete_environment()
        if "RANK" in os.environ:
            program += f", rank {os.environ['RANK']}"
        handle_stop_signals(partial(_leave, program))
        check_locale()
        main(sys.argv[1:])
        sys.stdout.flush()
    except BadInput as problem:
        print(fit_to_terminal(f"{program}: {problem}", sys.stderr), file=sys.stderr)
        repeat_after_launcher(f"{program}: {problem}")
        return 2
    except PermissionError as error:
        if error.filename is None:  # not about a file
            raise
        problem_of_path = f"{error.filename}: {error.strerror}: name another path, or get access"
        print(fit_to_terminal(f"{program}: {problem_of_path}", sys.stderr), file=sys.stderr)
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


def fit_to_terminal(text: str, stream: TextIO) -> str:
    """Break long lines at spaces if `stream` is a terminal, which would break them in the middle of a number.

    A line with a command stays whole, so that it can be copied.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(
        width,
        subsequent_indent="    ",
        replace_whitespace=False,
        break_long_words=False,  # such as paths, which can then be copied
        break_on_hyphens=False,
    )
    return "\n".join(line if "python " in line else wrapper.fill(line) for line in text.splitlines())


def open_closed_streams() -> None:
    """Open /dev/null in place of stdin, stdout and stderr where they are closed, as some schedulers leave them.

    Otherwise the next files that are opened, such as the pipe to a simulator, would get their numbers.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            lowest_free = os.open(os.devnull, os.O_RDWR)  # the same as `descriptor`
            os.set_inheritable(lowest_free, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w", closefd=False))


def complete_environment() -> None:
    """Set what containers leave out of the environment, and check what launchers of ranks put into it.

    A process that trains alone loses the variables of ranks. Raises BadInput if they name no rank of several.
    """
    # By default PyTorch's threads keep their cores busy while they wait. When another program uses the same cores, this
    # makes an update take 5 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Some containers and service managers do not set HOME, which wandb needs. Without it and without an entry in passwd
    # libraries would make a folder named ~.
    home = os.path.expanduser("~")
    os.environ["HOME"] = "/nonexistent" if home == "~" else home
    try:
        getpass.getuser()
    except (KeyError, OSError):  # a user without an entry in passwd; torch asks for a name
        os.environ["LOGNAME"] = f"user-{os.getuid()}"
    size = os.environ.get("WORLD_SIZE") or "1"
    if size == "1":
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        return
    rank = os.environ.get("RANK", "")
    local_rank = os.environ.get("LOCAL_RANK", "")
    are_numbers = size.isdecimal() and rank.isdecimal() and local_rank.isdecimal()
    if not are_numbers or int(rank) >= int(size):
        raise BadInput(
            f"WORLD_SIZE={size} RANK={rank} LOCAL_RANK={local_rank} in the environment name no rank of several: unset "
            "WORLD_SIZE to train in one process; --data-parallel, torchrun and accelerate set all of them"
        )


def _leave(program: str, signal_number: int, frame: object) -> None:
    """End the program at once; `experiment.stopping.interruptible` takes over while a run must be closed."""
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


def check_locale() -> None:
    """Raise BadInput if a folder or flag has letters that libraries, which expect UTF-8, would not find."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not "".join((*sys.argv, os.getcwd(), os.path.expanduser("~"))).isascii():
        raise BadInput(
            f"the locale's encoding is {encoding}, in which names of folders with letters beyond ASCII are not found: "
            "set LC_ALL=C.UTF-8 and unset PYTHONUTF8"
        )


def repeat_after_launcher(text: str) -> None:
    """Print a line once more after torchrun or accelerate has ended, because they end with a long traceback."""
    if not SET_BY_LAUNCHERS.isdisjoint(os.environ):
        command = [sys.executable, "-c", AFTER_PARENT, str(PARENT), text]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
