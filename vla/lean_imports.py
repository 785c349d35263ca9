"""Import a library without an optional library that it would import along."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_module(name: str) -> Iterator[None]:
    """Within this block, `import name` raises ImportError, unless the module has been imported before."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark for a module that must not be imported
    try:
        yield
    finally:
        del sys.modules[name]
