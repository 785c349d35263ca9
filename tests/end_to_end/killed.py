"""Run the `main` of a module and die by SIGKILL at a chosen moment.

    python -m tests.end_to_end.killed WHERE COUNT MODULE ARGV...

WHERE: chunk (before the COUNT-th chunk of actions of the inline simulator), update (before the COUNT-th optimizer step)
or checkpoint (before the COUNT-th state is written, of a checkpoint or an evaluation). Of several ranks number 1 dies.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable

import torch

from envs.libero import LiberoEnv

PLACES = {
    "chunk": (LiberoEnv, "step_chunk"),
    "update": (torch.optim.AdamW, "step"),
    "checkpoint": (torch, "save"),
}


def dying_at_call(count: int, function: Callable) -> Callable:
    """`function`, which kills the process instead when it is called for the `count`-th time."""
    num_calls = 0

    def wrapped(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapped


if __name__ == "__main__":
    where, count, module, *argv = sys.argv[1:]
    if os.environ.get("RANK", "1") == "1":
        owner, name = PLACES[where]
        setattr(owner, name, dying_at_call(int(count), getattr(owner, name)))
    importlib.import_module(module).main(argv)
