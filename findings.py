"""What checks have found: one line for each, readable with and without colours."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.text import Text

from errors import BadInput
from rl.selfcheck import SelfCheckError

log = logging.getLogger("train")
T = TypeVar("T")
Status = Literal["ok", "warning", "FAILED", "skipped"]
STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "FAILED": "bold red", "skipped": "dim"}


class Caution(str):
    """A finding with which a run works, but slowly or otherwise than meant; it says what helps."""


@dataclass(frozen=True)
class Finding:
    check: str
    status: Status
    text: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status:8} {self.check:14} {self.seconds:5.1f} s  {self.text}"


class Checks:
    """Makes checks one after the other and remembers their findings.

    The first failure is raised. With `show_all` it is a finding like others, and all are printed as they are made: a
    crash that takes the program along leaves those before it on the screen.
    """

    def __init__(self, show_all: bool = False, silent: bool = False) -> None:
        self.findings: list[Finding] = []
        self._show_all = show_all
        # Long lines are the terminal's to wrap: a command in them can be copied.
        self._console = Console(quiet=silent or not show_all, soft_wrap=True, highlight=False)

    def make(self, name: str, check: Callable[..., str], *needs: Any) -> None:
        """Make `check(*needs)`, which returns its finding; it is skipped when one of `needs` is None."""
        self.obtain(name, check, lambda finding: finding, *needs)

    def obtain(self, name: str, get: Callable[..., T], describe: Callable[[T], str], *needs: Any) -> T | None:
        """The value of `get(*needs)`, with `describe(value)` as the finding; None when either of them failed.

        It is skipped when one of `needs` is None: what should have given it has failed.
        """
        if any(need is None for need in needs):
            self._add(Finding(name, "skipped", "what it needs has failed", 0.0))
            return None
        started, value = time.perf_counter(), None
        status: Status = "ok"
        try:
            found = get(*needs)
            text = describe(found)
            value = found
            if isinstance(text, Caution):
                status = "warning"
        except Exception as failure:
            if not self._show_all:
                raise
            status, text = "FAILED", _in_one_line(failure)
        self._add(Finding(name, status, text, time.perf_counter() - started))
        return value

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._console.print(Text(str(finding), style=STYLES[finding.status]))

    def passed(self, *names: str) -> bool | None:
        """True, or None when one of these checks did not pass: for those that need it."""
        blocking = [f for f in self.findings if f.check in names and f.status in ("FAILED", "skipped")]
        return None if blocking else True

    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "warning"]

    def summary(self) -> str:
        counts = Counter(finding.status for finding in self.findings)
        counted = ", ".join(f"{counts[status]} {status}" for status in STYLES if counts[status])
        return f"{len(self.findings)} checks in {sum(finding.seconds for finding in self.findings):.1f} s: {counted}"

    def conclude(self) -> None:
        """Print the summary. Raises BadInput when a check has failed."""
        self._console.print(self.summary())
        failed = [finding for finding in self.findings if finding.status == "FAILED"]
        if failed:
            raise BadInput(f"{len(failed)} of {len(self.findings)} checks FAILED; {failed[0].check}: {failed[0].text}")


def _in_one_line(failure: Exception) -> str:
    if isinstance(failure, (BadInput, SelfCheckError)):
        return str(failure)
    log.error("a check ended in a fault", exc_info=failure)
    reason = (str(failure).splitlines() or [""])[0]
    return f"{type(failure).__name__}: {reason} (its traceback is above: a fault of the program or of a library)"
