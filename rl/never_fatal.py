"""What watches a run must never end it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from interrupts import pass_on_interrupt

log = logging.getLogger(__name__)


@contextlib.contextmanager
def never_fatal(what: str, then: str = "the run goes on", give_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn a failure of the block into one line of the log, `what (reason); then`, and call `give_up`."""
    try:
        yield
    except Exception as error:
        pass_on_interrupt(error)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        log.warning("%s (%s); %s", what, reason, then)
        give_up()
