"""Run the `main` of a module in a process, which gets a signal at a chosen moment.

    python -m tests.end_to_end.struck SIGNAL WHERE COUNT MODULE ARGV...

WHERE: chunk (before the COUNT-th chunk of actions of reach.py's simulator), update (before the COUNT-th optimizer step)
or checkpoint (before the COUNT-th state is written, of a checkpoint or an evaluation). Of several ranks number 1 gets
it.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

import torch

from command_line import main_guard
from tests.end_to_end.reach import ReachEnv

PLACES = {
    "chunk": (ReachEnv, "step_chunk"),
    "update": (torch.optim.AdamW, "step"),
    "checkpoint": (torch, "save"),
}


def struck_at_call(signal_number: int, count: int, function: Callable) -> Callable:
    """`function`, which first sends the signal to its process when it is called for the `count`-th time."""
    num_calls = 0

    def wrapped(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == count:
            os.kill(os.getpid(), signal_number)
        return function(*args, **kwargs)

    return wrapped


def strike(signal_number: int, where: str, count: int) -> None:
    """Let the signal come to this process at the place, when it is reached for the `count`-th time."""
    owner, name = PLACES[where]
    setattr(owner, name, struck_at_call(signal_number, count, getattr(owner, name)))


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
    signal_name, where, count, module, *argv = sys.argv[1:]
    if os.environ.get("RANK", "1") == "1":
        strike(signal.Signals[signal_name], where, int(count))
    main = importlib.import_module(module).main
    sys.exit(main_guard("train_grpo.py", lambda _: main(argv), knows_ranks=True))
