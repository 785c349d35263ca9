"""Run checks one after the other; each has a one-line result, which says what to do if something is wrong."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec

from experiment.terminal import is_first_rank, say

P = ParamSpec("P")


@dataclass(frozen=True)
class Check:
    """The result of a check: a status and one line, which says what to do for a warning."""

    status: Literal["ok", "warning"]
    text: str


class Checks:
    """Runs checks and keeps their results. With `printed` (`--check-only`) each result is a line on the screen."""

    def __init__(self, printed: bool = False) -> None:
        self.results: dict[str, Check] = {}  # by name, in the order in which the checks ran
        self._print = printed and is_first_rank()

    def run(self, name: str, check: Callable[P, Check | str], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a check, which raises BadInput for a failure, and add its result."""
        self.add(name, check(*args, **kwargs))

    def add(self, name: str, result: Check | str) -> None:
        """Add a result to the list. A text is ok."""
        self.results[name] = Check("ok", result) if isinstance(result, str) else result
        if self._print:
            say(f"{self.results[name].status:8} {name:14} {self.results[name].text}")

    def summary(self) -> str:
        """One line: the number of checks, and how many had each status."""
        counts = Counter(check.status for check in self.results.values())
        return f"{counts['ok']} ok, {counts['warning']} with a warning"

    def rows(self) -> list[tuple[str, str]]:
        """Summary and warnings as rows (title, text) of the table that a run logs at its start."""
        rows = [("checks", self.summary())]
        for name, check in self.results.items():
            if check.status == "warning":
                rows.append(("warning", f"{name}: {check.text}"))
        return rows
