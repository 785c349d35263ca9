"""Measure the parts of a program's start: how many seconds each takes, from the command on."""

import time

from command_line import PROGRAM_STARTED


class StartTimes:
    """The parts of a start, one after the other, without gaps. The first begins with the program: its imports."""

    def __init__(self, started: float = PROGRAM_STARTED) -> None:
        self.seconds: dict[str, float] = {}  # by part
        self._ended = started  # when the last part ended, on time.perf_counter's clock

    def end(self, part: str) -> float:
        """The part that has just ended gets the seconds since the part before it ended. Returns them."""
        seconds = time.perf_counter() - self._ended
        self._ended += seconds
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        return seconds

    def __str__(self) -> str:
        parts = [f"{part} {seconds:.1f}" for part, seconds in self.seconds.items() if seconds >= 0.1]
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts)}"
