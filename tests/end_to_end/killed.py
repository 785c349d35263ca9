"""Run train_grpo.py and die by SIGKILL at a chosen moment: python -m tests.end_to_end.killed WHERE COUNT ARGV...

WHERE: rollout (before the COUNT-th chunk of actions of the training rollouts), update (before the COUNT-th optimizer
step) or checkpoint (with the COUNT-th checkpoint half-written). Under `accelerate launch` rank 1 dies.
"""

import os
import signal
import sys
from collections.abc import Callable

import torch

import rl.checkpoints
import rl.rollout
import train_grpo


def dying_at_call(count: int, function: Callable) -> Callable:
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapped


if __name__ == "__main__":
    where, count, *argv = sys.argv[1:]
    if os.environ.get("RANK", "1") != "1":
        pass
    elif where == "rollout":
        rl.rollout._serve = dying_at_call(int(count), rl.rollout._serve)
    elif where == "update":
        torch.optim.AdamW.step = dying_at_call(int(count), torch.optim.AdamW.step)
    elif where == "checkpoint":  # the adapter is already on the disk
        rl.checkpoints.torch.save = dying_at_call(int(count), torch.save)
    train_grpo.main(argv)
