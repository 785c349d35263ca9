"""Show what a program is doing: log lines on the terminal and in train.log, and a progress bar."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

INFORMATIVE_LOGGERS = ("__main__", "train_grpo", "preflight", "experiment", "rl", "vla")


class TerminalHandler(logging.StreamHandler):
    """Writes log lines to sys.stdout as it is when the line is logged.

    While a progress bar is shown, rich replaces sys.stdout by a stream that prints lines above the bar.
    """

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def log_to_terminal(*files: Path) -> None:
    """Send the log of rank 0 to the terminal and to `files`; other ranks log nothing."""
    if os.environ.get("RANK", "0") != "0":
        return
    handlers: list[logging.Handler] = [TerminalHandler()]
    handlers += [logging.FileHandler(file) for file in files]
    logging.basicConfig(force=True, level=logging.ERROR, format="%(message)s", handlers=handlers)
    # If the terminal is closed or the disk is full, a log line is lost, and logging prints no traceback.
    logging.raiseExceptions = False
    for name in INFORMATIVE_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("envs").setLevel(logging.WARNING)


@contextlib.contextmanager
def progress_bar(description: str, total: int | None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stdout is a terminal. Yields a function `advance(count)` that moves the bar.

    `total`: the count at the end, or None if it is not known.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_disabled = not (shown and sys.stdout.isatty())
    with Progress(*columns, transient=True, disable=is_disabled) as bar:
        task = bar.add_task(description, total=total)

        def advance(count: int) -> None:
            bar.advance(task, count)

        yield advance
