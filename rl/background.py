"""Errands that a run must not wait for."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable


class Background:
    """Does errands one after the other on a thread of its own, which the end of the program does not wait for."""

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def do(self, errand: Callable[[], None]) -> None:
        """Put it at the end of the queue. What it raises is lost."""
        self._errands.put(errand)

    def finished_within(self, seconds: float) -> bool:
        """Wait for all errands so far, no longer than that; whether they are done."""
        done = threading.Event()
        self.do(done.set)
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                self._errands.get()()
