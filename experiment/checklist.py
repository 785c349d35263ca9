"""A list of checks: made one after the other, each with a line that a user can act on."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from contracts import BadInput, SelfCheckError, first_line

log = logging.getLogger(__name__)
Status = Literal["ok", "warning", "FAILED", "skipped"]
T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """What a check found: one line, which for a warning or a failure says what to do."""

    status: Status
    text: str

    @property
    def passed(self) -> bool:
        return self.status in ("ok", "warning")


class Checks:
    """The checks made so far. A failure is raised; with `show_all` it is printed, as all the others are."""

    def __init__(self, show_all: bool = False) -> None:
        self.made: dict[str, Check] = {}  # by name, in the order in which they were made
        self._show_all = show_all
        self._print = show_all and os.environ.get("RANK", "0") == "0"
        self._started = time.perf_counter()
        self._last_line = self._started

    def run(self, name: str, check: Callable[..., Check], *values: object, after: Sequence[str] = ()) -> None:
        """Make a check. It is skipped when one of its values is None, or a check named in `after` did not pass."""
        result = self._attempt(name, check, values, after)
        if result is not None:
            self._add(name, result)

    def make(
        self,
        name: str,
        check: Callable[[T], Check],
        function: Callable[..., T],
        *values: object,
        after: Sequence[str] = (),
    ) -> T | None:
        """Make function(*values), and check it. None when that failed, or was skipped as in `run`."""
        value = self._attempt(name, function, values, after)
        if value is None:
            return None
        self.run(name, check, value)
        return value if self.made[name].passed else None

    def _attempt(
        self, name: str, function: Callable[..., T], values: Sequence[object], after: Sequence[str]
    ) -> T | None:
        if any(value is None for value in values) or not all(self.made[other].passed for other in after):
            self._add(name, Check("skipped", "what it needs has failed"))
            return None
        try:
            return function(*values)
        except Exception as failure:
            if not self._show_all:
                raise
            text = str(failure)
            if not isinstance(failure, BadInput | SelfCheckError):
                log.error("a check ended in a fault", exc_info=failure)
                text = f"{type(failure).__name__}: {first_line(failure)} (a fault: its traceback is above)"
            self._add(name, Check("FAILED", text))
            return None

    def _add(self, name: str, check: Check) -> None:
        """Keep a check, and print it with the seconds since the line before."""
        if check.status == "FAILED" and not self._show_all:
            raise BadInput(check.text)
        self.made[name] = check
        now = time.perf_counter()
        if self._print:
            print(f"{check.status:8} {name:14} {now - self._last_line:5.1f} s  {check.text}", flush=True)
        self._last_line = now

    def summary(self) -> str:
        counts = Counter(check.status for check in self.made.values())
        counted = ", ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts[status])
        return f"{len(self.made)} checks in {time.perf_counter() - self._started:.1f} s: {counted}"

    def rows(self) -> list[tuple[str, str]]:
        """The summary and the warnings, as (title, text), for the table that a run shows at its start."""
        rows = [("checks", self.summary())]
        for name, check in self.made.items():
            if check.status == "warning":
                rows.append(("warning", f"{name}: {check.text}"))
        return rows

    def conclude(self) -> None:
        """Print the summary. Raises BadInput when a check has failed."""
        if self._print:
            print(self.summary())
        failed = [f"{name}: {check.text}" for name, check in self.made.items() if check.status == "FAILED"]
        if failed:
            raise BadInput(f"{len(failed)} of {len(self.made)} checks FAILED; {failed[0]}")
