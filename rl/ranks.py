"""The processes that train one policy together (`accelerate launch`), and the few things that they do in common.

Every rank plays episodes of its own. Then all of them hold all trajectories and compute the same numbers from them, so
that each decides for itself what the others decide, too: which minibatches there are, when to stop, what to record.
Only forward and backward passes are divided; their gradients are added up before the optimizer step. With one process
every operation here is the identity.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from errors import BadInput

T = TypeVar("T")
Shared = TypeVar("Shared", Tensor, list[Any])

# A rank that waits this long takes the others for dead. Ranks wait for the slowest rollout and for rank 0's disk.
PATIENCE = timedelta(minutes=30)
ELEMENTS_PER_MESSAGE = 2**23  # of gradients: 32 MiB


class RanksLost(SystemExit):
    """Another rank stopped or does not answer: this one ends too, with one line and exit code 1."""


@dataclass(frozen=True)
class Ranks:
    """This process (`rank`) among `size` that train together."""

    rank: int = 0
    size: int = 1
    # Carries Python objects over the CPU (gloo): nothing of them takes GPU memory, and a waiting rank burns no core.
    objects: dist.ProcessGroup | None = None
    shard_base: bool = False  # the frozen weights are spread over the ranks: all run the network equally often

    @property
    def is_main(self) -> bool:
        """Whether this rank logs, and writes files."""
        return self.rank == 0

    @property
    def launcher(self) -> str:
        """What starts as many processes."""
        return "python" if self.size == 1 else f"accelerate launch --num_processes {self.size}"

    def share(self, items: Shared) -> Shared:
        """This rank's part: every `size`-th item."""
        return items[self.rank :: self.size]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks; also a point at which all ranks wait for one another."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _answer_expected(self):
            dist.all_gather_object(values, value, group=self.objects)
        return values

    def wait_for_all(self) -> None:
        self.gather(None)

    def from_main(self, value: T | None) -> T:
        """Rank 0's value; what the others pass is ignored."""
        values: list[Any] = self.gather(value if self.is_main else None)
        return values[0]

    def divide(self, count: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """`compute` of the rows 0 .. count - 1, a part of them on each rank: compute((n,) rows) -> (n, ...) on the CPU.

        All ranks get the same bits, whatever their hardware, so what they decide from them agrees. The last ones repeat
        rows: all compute equally many.
        """
        part = -(-count // self.size)
        own = torch.arange(self.rank * part, (self.rank + 1) * part) % count
        return torch.cat(self.gather(compute(own)))[:count]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the ranks, in parts: a full GPU has no room for a copy of all.

        A rank without a gradient adds zeros. Where no rank has one, none appears: AdamW would decay such a parameter.
        """
        if self.size == 1:
            return
        reached = zip(*self.gather([p.grad is not None for p in parameters]), strict=True)  # parameters, by rank
        gradients = [_gradient_of(p) for p, by_rank in zip(parameters, reached, strict=True) if any(by_rank)]
        with _answer_expected(self):
            for part in _parts(gradients, ELEMENTS_PER_MESSAGE):
                flat = torch.cat([gradient.flatten() for gradient in part])
                dist.all_reduce(flat)
                sums = flat.split([gradient.numel() for gradient in part])
                # In place: recorded passes know where a gradient lies.
                torch._foreach_copy_(part, [total.view_as(g) for total, g in zip(sums, part, strict=True)])

    def leave(self) -> None:
        """After the last common act."""
        if self.size > 1:
            self.wait_for_all()
            dist.destroy_process_group()


ALONE = Ranks()


def own_gpu() -> torch.device:
    """The GPU of this process: of those that `accelerate launch` starts on a machine each has one. Raises BadInput.

    Its number is said everywhere, because to some libraries "cuda" means the first.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here > torch.cuda.device_count():
        raise BadInput(
            f"{here} processes on this machine, but torch sees {torch.cuda.device_count()} GPU(s): give accelerate "
            "launch as many --num_processes as there are GPUs, or --device cpu"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def join_ranks(device: torch.device, patience: timedelta = PATIENCE) -> Ranks:
    """Meet the other processes of `accelerate launch`, and make this rank's GPU the current one. Raises BadInput.

    Started as plain `python`, nothing is initialised.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    from accelerate import PartialState  # a second of imports that a single process does not need

    try:
        state = PartialState(cpu=device.type == "cpu", timeout=patience)
        objects = dist.new_group(backend="gloo", timeout=patience)
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL takes its memory now, before anyone measures what is left
    except (RuntimeError, ValueError) as error:
        raise BadInput(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot meet the others ({_first_line(error)}): "
            "start the same number of processes on every machine, with one main_process_ip and main_process_port"
        ) from None
    shard_base = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    # torch's type allows for processes outside the group, of which there are none.
    return Ranks(state.process_index, state.num_processes, objects, shard_base)  # type: ignore[arg-type]


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _parts(tensors: Sequence[Tensor], at_most: int) -> Iterator[list[Tensor]]:
    """In the same order, each part with at most so many elements, or with one tensor."""
    part: list[Tensor] = []
    count = 0
    for tensor in tensors:
        if part and count + tensor.numel() > at_most:
            yield part
            part, count = [], 0
        part.append(tensor)
        count += tensor.numel()
    if part:
        yield part


@contextlib.contextmanager
def _answer_expected(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise RanksLost(
            f"rank {ranks.rank}: another rank has stopped, its own message says why, or was silent for too long "
            f"({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
