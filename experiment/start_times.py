"""Measure the parts of a program's start: how many seconds each takes, from the command on."""

import time

from command_line import PROGRAM_STARTED
from experiment.terminal import PERIOD_S

FIRST_LINE_S = 2.0  # a part that takes longer is named on the screen


class StartTimes:
    """The parts of a start, one after the other, without gaps. The first one, `imports`, begins with the program."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # by part
        self._part: str | None = "imports"  # the part under way
        self._begun_at = PROGRAM_STARTED  # start of the part under way, or the end of the last part
        self._next_line_at = PROGRAM_STARTED + FIRST_LINE_S

    def begin(self, part: str) -> None:
        """End the part under way, and begin another; nothing happens if this part is under way already."""
        if self._part == part:
            return
        self.end()
        self._next_line_at = self._begun_at + FIRST_LINE_S
        self._part = part

    def end(self) -> float:
        """End the part under way. Returns its seconds.

        If no part is under way it returns 0, and the time since the last part counts for the next one.
        """
        if self._part is None:
            return 0.0
        seconds = time.perf_counter() - self._begun_at
        self.seconds[self._part] = self.seconds.get(self._part, 0.0) + seconds
        self._part = None
        self._begun_at += seconds
        return seconds

    def restart(self) -> None:
        """Another start begins now."""
        self.seconds.clear()
        self._part = None
        self._begun_at = time.perf_counter()

    def due_line(self) -> str | None:
        """A line for a part that takes FIRST_LINE_S seconds, and after every PERIOD_S seconds more of it; else None."""
        now = time.perf_counter()
        part = self._part
        if part is None or now < self._next_line_at:
            return None
        self._next_line_at = now + PERIOD_S
        return f"starting: {part}, {now - self._begun_at:.0f} s"

    def __str__(self) -> str:
        parts = [f"{part} {seconds:.1f}" for part, seconds in self.seconds.items() if seconds >= 0.1]
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts)}"
