"""Show what a program is doing: log lines on the terminal and in train.log, and how far a long activity is."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn

log = logging.getLogger(__name__)

INFORMATIVE_LOGGERS = ("__main__", "train_grpo", "preflight", "experiment", "rl", "vla")
LOG_TIME = "%Y-%m-%d %H:%M:%S"  # before every line of a log file
PERIOD_S = 20.0  # without a terminal a long activity shows a line every so many seconds


class TerminalHandler(logging.StreamHandler):
    """Writes to sys.stdout as it is when a line is logged: rich replaces it while it shows a moving line."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def log_to_terminal() -> None:
    """Send the log of rank 0 to the terminal, and keep it for `log_to_file`.

    Other ranks warn only of what may concern them alone: their simulators, and their GPU's memory.
    """
    levels = dict.fromkeys(INFORMATIVE_LOGGERS, logging.INFO) | {"envs": logging.WARNING}
    kept = logging.handlers.MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL + 1)
    handlers: list[logging.Handler] = [TerminalHandler(), kept]
    line = "%(message)s"
    if not is_first_rank():
        levels = {"envs": logging.WARNING, "vla.pass_sizes": logging.WARNING}
        handlers = [logging.StreamHandler()]
        line = f"rank {os.environ['RANK']}: {line}"
    logging.basicConfig(force=True, level=logging.ERROR, format=line, handlers=handlers)
    logging.raiseExceptions = False  # a line is lost if the terminal is closed or the disk is full
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def log_to_file(path: Path) -> None:
    """Send the log to a file, too: also what was logged so far. Every line gets its time."""
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s  %(message)s", LOG_TIME))
    for handler in list(logging.root.handlers):
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.setTarget(file)
            handler.close()  # it writes what it kept
            logging.root.removeHandler(handler)
    logging.root.addHandler(file)


def log_row(name: str, text: str) -> None:
    """Log a row of the table that a program shows while it starts; eval.py shows only those named warning."""
    log.log(logging.WARNING if name == "warning" else logging.INFO, "%-14s  %s", name, text)


@dataclass
class Activity:
    """Something that takes long, and how far it is; `str()` says so, with the time left at the same pace."""

    name: str
    total: int
    unit: str  # what is counted
    prints_lines: bool = False  # as long as it goes on
    done: int = 0
    successes: int | None = None  # None: what is counted cannot succeed
    started: float = field(default_factory=lambda: time.monotonic())
    advanced: float = field(default_factory=lambda: time.monotonic())

    def advance(self, count: int) -> None:
        """Count, and print a line if the clock has passed a multiple of PERIOD_S.

        So short activities in a row do not each print one.
        """
        self.done += count
        now = time.monotonic()
        if self.prints_lines and now // PERIOD_S > self.advanced // PERIOD_S:
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more
                say(str(self))
        self.advanced = now

    def count_episode(self, success: bool) -> None:
        """One more episode has ended."""
        self.successes = (self.successes or 0) + success
        self.advance(1)

    def __str__(self) -> str:
        succeeded = "" if self.successes is None else f", {self.successes} succeeded"
        left = ", finishing"  # a rollout then plays its last episodes to their ends
        if self.done < self.total:
            seconds = (time.monotonic() - self.started) * (self.total - self.done) / max(self.done, 1)
            left = f", {duration(seconds)} left" if self.done else ""
        return f"{self.name}: {min(self.done, self.total):,}/{self.total:,} {self.unit}{succeeded}{left}"


def duration(seconds: float) -> str:
    """A length of time for the reader, to two of its units: 45 s, 12 min, 3 h 20 min."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


@contextlib.contextmanager
def show_progress(name: str, total: int, unit: str, shown: bool = True) -> Iterator[Activity]:
    """Show an activity during this block: on a terminal as a moving line, else as a line every PERIOD_S seconds."""
    on_terminal = shown and sys.stdout.isatty()
    activity = Activity(name, total, unit, prints_lines=shown and not on_terminal)
    columns = (SpinnerColumn(), TextColumn("{task.fields[activity]}", markup=False))
    with Progress(*columns, transient=True, disable=not on_terminal) as moving_line:
        moving_line.add_task("", activity=activity)
        yield activity


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks."""
    return os.environ.get("RANK", "0") == "0"
