"""The order at the end of the program: first the simulators that are still open, then GL.

MuJoCo and robosuite each have the EGL display ended at exit, which they register when they make their first GL context,
and Python calls first what was registered last. A simulator that closes after the display has ended raises EGLError:
with LIBERO and Meta-World in one process that would happen to the one that was built first.
"""

import atexit
from collections.abc import Callable
from contextlib import ExitStack

_open: list[
    Callable[[], None]
] = []  # the close of every open simulator; atexit is one list for the process, too


def close_at_exit(close: Callable[[], None]) -> None:
    """Have `close` called at the end of the program. Call this after a simulator has made its GL context."""
    _open.append(close)
    # Register anew, and so before any end of a display that has been registered until now.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def forget(close: Callable[[], None]) -> None:
    """The simulator of `close` has been closed: do not close it at the end."""
    _open.remove(close)


def _close_all() -> None:
    """Close the last opened simulator first, and go on to the others if one fails."""
    with ExitStack() as stack:
        for close in _open:
            stack.callback(close)
