"""Send a signal to a process that runs a program, at a chosen moment.

    python -m tests.end_to_end.struck COUNT ARGV...   as reach.py, but rank 1 is killed before its COUNT-th step

Places: chunk (before a chunk of actions goes to a simulator), update (before an optimizer step) or checkpoint
(before a state is written, of a checkpoint or an evaluation).
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence

import torch

from command_line import main_guard
from envs.pool import Pool
from tests.end_to_end import reach

PLACES = {
    "chunk": (Pool, "step"),
    "update": (torch.optim.AdamW, "step"),
    "checkpoint": (torch, "save"),
}


def strike(signal_number: int, where: str, count: int) -> None:
    """Let the signal come to this process when the place is reached for the `count`-th time."""
    owner, name = PLACES[where]
    function = getattr(owner, name)
    calls = itertools.count(1)

    def struck(*args, **kwargs):
        if next(calls) == count:
            os.kill(os.getpid(), signal_number)
        return function(*args, **kwargs)

    setattr(owner, name, struck)


def exit_code_of_struck(
    main: Callable[[Sequence[str]], object], argv: list[str], signal_number: int, where: str, count: int
) -> int:
    """Of a program in a forked process, which gets the signal at the place; negative if that kills it."""
    child = os.fork()
    if child == 0:
        exit_code = 1
        try:
            torch.set_num_threads(1)  # the parent's threads do not exist here
            strike(signal_number, where, count)
            exit_code = main_guard(f"{main.__module__}.py", lambda _: main(argv))
        finally:
            sys.stdout.flush()
            os._exit(exit_code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    count = int(sys.argv.pop(1))
    if os.environ["RANK"] == "1":
        strike(signal.SIGKILL, "update", count)
    sys.exit(main_guard("train_grpo.py", reach.main, knows_ranks=True))
