"""Close the simulators that are still open at the end of the program, before GL ends.

MuJoCo and robosuite each end the EGL display at exit: they register that when they make their first GL context. Python
calls exit functions in reverse order of registration. A simulator that closes after the display has ended raises
EGLError. With LIBERO and Meta-World in one process, that would happen to the one that was built first.
"""

import atexit
from collections.abc import Callable
from contextlib import ExitStack

# The close method of every open simulator. It is global because atexit is one list for the whole process, too.
_open: list[Callable[[], None]] = []


def close_at_exit(close: Callable[[], None]) -> None:
    """Have `close` called at the end of the program. Call this after a simulator has made its GL context."""
    _open.append(close)
    # Register again, so that `_close_all` runs before every end of a display that has been registered so far.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def forget(close: Callable[[], None]) -> None:
    """Do not call `close` at the end of the program, because that simulator has been closed."""
    _open.remove(close)


def _close_all() -> None:
    """Close all open simulators, the one opened last first. If one fails to close, the others are closed anyway."""
    with ExitStack() as stack:
        for close in _open:
            stack.callback(close)
