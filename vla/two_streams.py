"""Two computations of a GPU at the same time."""

from collections.abc import Callable

import torch
from torch import Tensor


def side_by_side(
    first: Callable[[], Tensor], second: Callable[[], Tensor], stream: torch.cuda.Stream | None
) -> tuple[Tensor, Tensor]:
    """Results of both. With `stream` the second is computed on it while the GPU computes the first.

    Neither may free what the other reads. What the second one has allocated may be used, and freed, after the call:
    its memory is given to later work on `stream`, which begins by waiting for all that was asked of the GPU before.
    """
    if stream is None:
        return first(), second()
    here = torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        result = second()
    both = first(), result
    here.wait_stream(stream)
    return both
