"""A progress bar on a terminal, nothing in a log file."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress_bar(description: str, total: int | None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of things done since its last call."""
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


class TerminalHandler(logging.StreamHandler):
    """Writes to whatever sys.stdout is now: while a bar is shown that is rich's, which puts lines above the bar."""

    @property
    def stream(self) -> TextIO:
        return sys.stdout

    @stream.setter
    def stream(self, _: TextIO) -> None:
        pass

    def handleError(self, record: logging.LogRecord) -> None:
        """Nobody reads what the terminal or a pipe does not take, least of all a traceback about it."""


class LogFile(logging.FileHandler):
    """A log file that never stops or disturbs a run: when it cannot be written, that is said once on the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        logging.getLogger().removeHandler(self)
        logging.getLogger("train").warning(
            "%s cannot be written (%s); the log goes to the terminal only", self.baseFilename, sys.exc_info()[1]
        )


def duration(seconds: float) -> str:
    """A time span as people write it: `45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
