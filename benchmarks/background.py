"""Run a function beside a block of code, in a thread: benchmarks watch memory and processes with it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated_beside(function: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Call `function` every `interval_s` seconds, in a thread of its own, while this block runs."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(interval_s):
            function()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
