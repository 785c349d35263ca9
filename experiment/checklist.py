"""Run checks one after the other; each has a one-line result, which says what to do if something is wrong."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from contracts import BadInput, SelfCheckError, first_line
from experiment.start_times import StartTimes
from experiment.terminal import is_first_rank, say

log = logging.getLogger(__name__)
Status = Literal["ok", "warning", "FAILED", "skipped"]
T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """The result of a check: a status and one line, which says what to do for a warning or a failure."""

    status: Status
    text: str

    @property
    def passed(self) -> bool:
        return self.status in ("ok", "warning")


class Checks:
    """Runs checks and keeps their results.

    By default a failed check raises an exception. With `show_all` every result is printed, and the checks that do not
    depend on a failed one still run.
    """

    def __init__(self, times: StartTimes, show_all: bool = False) -> None:
        self.made: dict[str, Check] = {}  # results by name, in the order in which the checks ran
        self._show_all = show_all
        self._print = show_all and is_first_rank()
        self.times = times

    def run(
        self, name: str, check: Callable[..., Check | str], *values: object, after: Sequence[str] = ()
    ) -> None:
        """Run check(*values) and keep its result. A check that returns a text has passed.

        The check is skipped if one of its values is None (it could not be made), or if a check named in `after` did not
        pass. Without `show_all`, raises BadInput for a failure and passes on exceptions of the check.
        """
        result = self._attempt(name, check, values, after)
        if result is not None:
            self._add(name, Check("ok", result) if isinstance(result, str) else result)

    def make(
        self,
        name: str,
        check: Callable[[T], Check],
        function: Callable[..., T],
        *values: object,
        after: Sequence[str] = (),
    ) -> T | None:
        """Return function(*values) after checking it. Returns None if it failed, or was skipped as in `run`."""
        value = self._attempt(name, function, values, after)
        if value is None:
            return None
        self.run(name, check, value)
        return value if self.made[name].passed else None

    def _attempt(
        self, name: str, function: Callable[..., T], values: Sequence[object], after: Sequence[str]
    ) -> T | None:
        """Return function(*values). If it is skipped or raises, keep that result under `name` and return None."""
        self.times.begin(name)
        has_values = all(value is not None for value in values)
        if not has_values or not all(self.made[required].passed for required in after):
            self._add(name, Check("skipped", "what it needs has failed"))
            return None
        try:
            return function(*values)
        except Exception as failure:
            if not self._show_all:
                raise
            text = str(failure)
            if not isinstance(failure, BadInput | SelfCheckError):
                log.error("the check %r raised an exception that it should not raise", name, exc_info=failure)
                text = f"{type(failure).__name__}: {first_line(failure)} (a fault: its traceback is above)"
            self._add(name, Check("FAILED", text))
            return None

    def _add(self, name: str, check: Check) -> None:
        """Keep a result, and print it with the seconds since the previous line.

        Raises BadInput for a failure, unless `show_all`.
        """
        if check.status == "FAILED" and not self._show_all:
            raise BadInput(check.text)
        self.made[name] = check
        seconds = self.times.end()
        if self._print:
            say(f"{check.status:8} {name:14} {seconds:5.1f} s  {check.text}")

    def summary(self) -> str:
        """One line: the number of checks, and how many had each status."""
        counts = Counter(check.status for check in self.made.values())
        counted = ", ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts[status])
        return f"{len(self.made)} checks: {counted}"

    def rows(self) -> list[tuple[str, str]]:
        """Summary, seconds and warnings as rows (title, text) of the table that a run logs at its start."""
        rows = [("checks", self.summary()), ("start", str(self.times))]
        for name, check in self.made.items():
            if check.status == "warning":
                rows.append(("warning", f"{name}: {check.text}"))
        return rows

    def conclude(self) -> None:
        """Print the summary. Raises BadInput if a check has failed."""
        if self._print:
            print(self.summary())
        failed = [f"{name}: {check.text}" for name, check in self.made.items() if check.status == "FAILED"]
        if failed:
            raise BadInput(f"{len(failed)} of {len(self.made)} checks FAILED; {failed[0]}")
