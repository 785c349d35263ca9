"""What a run does when a GPU's memory does not suffice: less at once, which changes no result beyond rounding."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from errors import BadInput

log = logging.getLogger("train")

ADVICE = "lower --micro-batch-size or --max-batch, set --gradient-checkpointing on, or raise --memory-budget"
RENDERING = "lower --num-envs (simulators may render on the GPU), or close other programs on it"
LEARNING_LIMIT = (
    f"in an update with --micro-batch-size 1 and --gradient-checkpointing on: raise --memory-budget, {RENDERING}"
)
ACTING_LIMIT = f"in a decision with --max-batch 1: {RENDERING}"


@dataclass
class AtOnce:
    """How many decisions go through the network at once, per device. Each update and rollout begins with the most.

    It begins anew because the memory that was missing may have been another program's.
    """

    size: int
    learning: bool  # with activations kept for a backward pass

    def lower(self, policy: Any, reason: str) -> None:
        """After a pass that ran out of memory: halve the size; at 1 keep no activations. Raises BadInput at the end.

        A pass that other devices or ranks take part in cannot be taken back by this one alone.
        """
        if not policy.is_alone:
            raise BadInput(f"out of GPU memory ({reason}) in a pass that several devices share: {ADVICE}")
        torch.cuda.empty_cache()  # nothing on a CPU
        if self.size > 1:
            self.size //= 2
            log.warning("out of GPU memory (%s); the run goes on with %d decisions at once", reason, self.size)
        elif self.learning and policy.recompute_everything():
            log.warning("out of GPU memory (%s); the run goes on with all activations recomputed", reason)
        else:
            raise BadInput(f"out of GPU memory ({reason}) {LEARNING_LIMIT if self.learning else ACTING_LIMIT}")


def memory_problem(error: torch.OutOfMemoryError) -> str:
    """What to do about an error of the kind that nobody has dealt with."""
    return f"out of GPU memory ({first_line(error)}): {ADVICE}"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
