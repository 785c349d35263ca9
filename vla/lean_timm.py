"""timm, imported without wandb: a script of timm's own asks for it on the way, and it takes 2 of a start's 10 seconds.

Import timm from here, so that it is this import which comes first.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _as_if_missing(module: str) -> Iterator[None]:
    """Importing `module` raises ImportError, as if it were not installed. Without effect once it is imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # the import system's own sign for it
    try:
        yield
    finally:
        del sys.modules[module]


with _as_if_missing("wandb"):  # timm.utils.summary can do without
    import timm
    from timm.models.vision_transformer import VisionTransformer

__all__ = ["VisionTransformer", "timm"]
