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
        self._ended = PROGRAM_STARTED  # when the part before it ended, on time.perf_counter's clock
        self._last_line: tuple[str, float] = ("", 0.0)  # the part that `due_line` named last, and when

    def begin(self, part: str) -> None:
        """End the part under way, and begin another; nothing happens if this part is under way already."""
        if self._part != part:
            self.end()
            self._part = part

    def end(self) -> float:
        """End the part under way. Returns its seconds; 0 without one: the next part gets them."""
        if self._part is None:
            return 0.0
        seconds = time.perf_counter() - self._ended
        self._ended += seconds
        self.seconds[self._part] = self.seconds.get(self._part, 0.0) + seconds
        self._part = None
        return seconds

    def restart(self) -> None:
        """Another start begins now."""
        self.seconds.clear()
        self._part = None
        self._ended = time.perf_counter()

    def due_line(self) -> str | None:
        """A line for a part that is new and takes a while, and after every PERIOD_S seconds of it; else None."""
        part = self._part
        now = time.perf_counter()
        last_part, printed_at = self._last_line
        pause = PERIOD_S if part == last_part else FIRST_LINE_S
        begun = printed_at if part == last_part else self._ended
        if part is None or now - begun < pause:
            return None
        self._last_line = (part, now)
        return f"starting: {part}, {now - self._ended:.0f} s"

    def __str__(self) -> str:
        parts = [f"{part} {seconds:.1f}" for part, seconds in self.seconds.items() if seconds >= 0.1]
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts)}"
