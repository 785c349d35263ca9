"""What Ctrl-C, SIGTERM and a reader that has gone do to a program: one line, exit code 130, no traceback."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import ParamSpec, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
P = ParamSpec("P")
T = TypeVar("T")


def leave_at_once(program: str) -> None:
    """From now on SIGINT and SIGTERM end the program where it stands: for its imports, which have nothing to save.

    An exception would not do there: it would have to pass through the import machinery of every library.
    """

    def leave(number: int, frame: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(130)

    for number in _heeded():
        signal.signal(number, leave)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within this block the first SIGINT or SIGTERM raises KeyboardInterrupt, a second one kills the program.

    It is raised where an exception gets through and does no harm. So an import is finished first: interrupted, it
    leaves a lock behind that the next import of the same module waits for without end, or C++ code aborts the program.
    So is a function that is decorated with `finished_first`.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for again in handled:
            signal.signal(again, signal.SIG_DFL)
        if frame is None or (outside := _first_outside(frame)) is frame:
            raise KeyboardInterrupt
        _raise_in(outside)

    def not_lost(unraisable: sys.UnraisableHookArgs) -> None:
        """Python cannot raise in a destructor or in the callback of a weak reference, only in what they came upon."""
        if unraisable.exc_type is KeyboardInterrupt:
            _raise_in(sys._getframe(1))
        else:
            unraisable_before(unraisable)

    handled = _heeded()
    before = {number: signal.getsignal(number) for number in handled}
    unraisable_before, trace_before = sys.unraisablehook, sys.gettrace()
    for number in handled:
        signal.signal(number, stop)
    sys.unraisablehook = not_lost
    try:
        yield
    except Exception as fault:
        pass_on_interrupt(fault)
        raise
    finally:
        for number in handled:
            signal.signal(number, before[number])
        sys.unraisablehook = unraisable_before
        sys.settrace(trace_before)


def finished_first(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate what must not stay half done: an interrupt that arrives there is raised when it is done."""

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    return whole


WHOLE = finished_first(str).__code__  # of all functions that are decorated so


def pass_on_interrupt(fault: BaseException) -> None:
    """Raise the KeyboardInterrupt that `fault` was made of, if it was: for whoever goes on after a fault.

    ctypes reports an ArgumentError if it was converting an argument (OpenGL is called so), other libraries an error of
    their own with the interrupt as its cause. What fails while an interrupt is dealt with is another matter: that has
    it as context, not as cause.
    """
    cause: BaseException | None = fault
    while cause is not None:
        # ctypes keeps of an exception only what it is called: "argument 1: KeyboardInterrupt: "
        by_ctypes = isinstance(cause, ctypes.ArgumentError) and KeyboardInterrupt.__name__ in str(cause)
        if isinstance(cause, KeyboardInterrupt) or by_ctypes:
            raise KeyboardInterrupt from fault
        cause = cause.__cause__


def give_up_broken_stdout() -> None:
    """Where nobody reads the output any more (`| head`, a `| tee` that Ctrl-C ended, too), do not complain at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _heeded() -> list[signal.Signals]:
    """Those that are not ignored from the start, as SIGINT is in a shell's background job."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def _first_outside(frame: FrameType) -> FrameType:
    """`frame`, or what waits for it to finish an import, or a function that is finished first."""
    outside = above = frame
    while above.f_back is not None:
        if above.f_code.co_filename.startswith("<frozen importlib") or above.f_code is WHOLE:
            outside = above.f_back
        above = above.f_back
    return outside


def _raise_in(frame: FrameType) -> None:
    """Raise KeyboardInterrupt at the next line of `frame`; if it has none left, of the function that it returns to."""

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        sys.settrace(None)
        raise KeyboardInterrupt

    above: FrameType | None = frame
    while above is not None:
        above.f_trace = interrupt
        above = above.f_back
    sys.settrace(lambda *_: None)  # without it no function is traced
