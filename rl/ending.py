"""How a run ends: its folder is closed, the log says why, and what the user can repair is one line."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Iterator

import torch

from errors import BadInput, TimeIsUp
from rl.disk import disk_problem
from rl.out_of_memory import memory_problem
from rl.ranks import Ranks, RanksLost
from rl.run import Run

log = logging.getLogger("train")


@contextlib.contextmanager
def until_the_end(run: Run, ranks: Ranks) -> Iterator[None]:
    """Everything that happens in a run's folder happens in this block. Raises BadInput for what the user can repair."""
    try:
        yield
        run.folder.stat()  # deleted in the last minutes, when what is written may fail?
    except BaseException as reason:
        if os.path.exists(run.checkpoints / "latest"):
            log.warning("stopped; go on with: %s train_grpo.py --resume %s", ranks.launcher, run.folder)
        problem = problem_of(reason, run)
        run.note(problem or explanation(reason))
        run.close(exit_code=0 if isinstance(reason, TimeIsUp) else 1)
        if problem is not None:
            raise BadInput(problem) from reason
        raise
    run.close()


def problem_of(reason: BaseException, run: Run) -> str | None:
    """What a disk or a GPU has refused, in a sentence; None for all else."""
    if isinstance(reason, OSError):
        return disk_problem(reason, run.folder)
    if isinstance(reason, torch.OutOfMemoryError):
        return memory_problem(reason)
    return None


def explanation(reason: BaseException) -> str:
    """A fault of the program with its traceback, anything else in one line."""
    if isinstance(reason, BadInput | TimeIsUp | RanksLost):
        return str(reason)
    if isinstance(reason, KeyboardInterrupt):
        return "interrupted"
    return "".join(traceback.format_exception(reason)).rstrip()
