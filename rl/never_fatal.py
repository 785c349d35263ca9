"""What watches a run must never end it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)


@contextlib.contextmanager
def never_fatal(what: str, give_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn a failure of the block into one line of the log, `what` (reason), and call `give_up`."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        log.warning("%s (%s)", what, reason)
        give_up()
