"""The processes (ranks) that train one policy together, and the few things that they do in common.

Every rank plays episodes of its own. Then all ranks hold all trajectories, and decide the same from them. Only forward
and backward passes are divided, and their gradients added up. With one process every operation here is the identity.
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
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from contracts import BadInput, SelfCheckError, first_line

T = TypeVar("T")

BYTES_PER_MESSAGE = 2**25  # of gradients
# After this time without an answer the other ranks count as dead. The slowest rollout and rank 0's disk take less.
PATIENCE = timedelta(minutes=30)


class RanksLost(SystemExit):
    """Another rank has stopped or does not answer: this one ends, too, with one line and exit code 1."""


@dataclass(frozen=True)
class Ranks:
    """This process (`rank`) among `size` that train together."""

    rank: int = 0
    size: int = 1
    # Python objects travel by gloo: they take no GPU memory, and a rank that waits for them needs no core.
    objects: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank logs, and writes files."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value; also a point at which all ranks wait for one another."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        with self._answer_expected():
            dist.all_gather_object(values, value, group=self.objects)
        return values

    def from_main(self, value: Any) -> Any:
        """Rank 0's value. What the other ranks pass is ignored, and may be of another type."""
        return self.gather(value)[0]

    def divide(self, count: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """`compute` of the rows 0 .. count - 1, a part of them on each rank: compute((n,) rows) -> (n, ...) on the CPU.

        All ranks get the same bits. The last ranks repeat rows, so that all compute equally many.
        """
        rows_per_rank = -(-count // self.size)
        first_row = self.rank * rows_per_rank
        rows = torch.arange(first_row, first_row + rows_per_rank) % count
        return torch.cat(self.gather(compute(rows)))[:count]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the ranks.

        In place, because recorded CUDA graphs write gradients to fixed addresses. In flat messages, because tensor by
        tensor (878 of them) it takes 35 ms instead of 7 on two H200s; in several, because a full GPU has no room for a
        copy of all gradients. A parameter without a gradient on any rank gets none: with one AdamW would decay it.
        """
        if self.size == 1:
            return
        has_gradient = self.gather([parameter.grad is not None for parameter in parameters])  # by rank
        gradients: list[Tensor] = []
        for parameter, on_ranks in zip(parameters, zip(*has_gradient, strict=True), strict=True):
            if any(on_ranks):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        with self._answer_expected():
            for message in _take_tensors(gradients, BYTES_PER_MESSAGE):
                flat = _flatten_dense_tensors(message)
                dist.all_reduce(flat)
                torch._foreach_copy_(message, _unflatten_dense_tensors(flat, message))

    def check_same_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """All ranks hold the same float32 parameters: the sums of their bits as integers agree."""
        if self.size == 1:
            return
        bit_sums = [parameter.detach().view(torch.int32).sum(dtype=torch.int64) for parameter in parameters]
        checksums = torch.stack(bit_sums).tolist()
        if any(checksums_of_rank != checksums for checksums_of_rank in self.gather(checksums)):
            raise SelfCheckError(
                "the ranks no longer train the same policy: trainable tensors differ after an update; resume from the "
                "last checkpoint, on machines of one kind"
            )

    def leave(self) -> None:
        """Part from the other ranks, when all is done."""
        if self.size > 1:
            self.gather(None)
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _answer_expected(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise RanksLost(
                f"rank {self.rank}: another rank has stopped, its own message says why, or was silent for too long "
                f"({first_line(error)})"
            ) from error


ALONE = Ranks()


def join_ranks(device: torch.device | str = "auto") -> Ranks:
    """Meet the other ranks, and make this one's GPU the current one. A process that is alone meets nobody."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    on_gpu = torch.cuda.is_available() and torch.device("cuda" if device == "auto" else device).type == "cuda"
    try:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
        objects = dist.new_group(backend="gloo", timeout=PATIENCE)
        # NCCL takes its memory with the first message: now, before the program measures what is free.
        dist.all_reduce(torch.zeros(1, device="cuda" if on_gpu else "cpu"))
    except (RuntimeError, ValueError) as error:
        raise BadInput(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot meet the others ({first_line(error)}): "
            "start as many processes on every machine, with one main_process_ip and main_process_port"
        ) from None
    return Ranks(dist.get_rank(), dist.get_world_size(), objects)  # type: ignore[arg-type]  # never outside the group
