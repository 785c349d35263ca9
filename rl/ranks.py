"""The processes (ranks) that train one policy together, and how they exchange data.

Every rank plays its own episodes. The trajectories are then gathered, so that all ranks hold all of them and compute
the same batches from them. Only the forward and backward passes are divided among the ranks, and their gradients are
added up. With one process every operation here returns its input.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from contracts import BadInput, SelfCheckError, first_line

T = TypeVar("T")

BYTES_PER_MESSAGE = 2**25  # size of the messages in which gradients are exchanged
# After this time without an answer the other ranks count as dead. The slowest rollout, or a save by rank 0, takes less.
PATIENCE = timedelta(minutes=30)


class RanksLost(SystemExit):
    """Another rank has stopped or does not answer. This one ends, too, with a message of one line and exit code 1."""


@dataclass(frozen=True)
class Ranks:
    """This process's `rank` among the `size` processes that train together."""

    rank: int = 0
    size: int = 1
    # Python objects are exchanged by gloo: that takes no GPU memory, and no CPU core while a rank waits. None if alone.
    objects: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes files."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks. All ranks wait here for one another."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        with self._answer_expected():
            dist.all_gather_object(values, value, group=self.objects)
        return values

    def broadcast(self, tensor: Tensor, source: int, device: torch.device) -> Tensor:
        """The tensor of the rank `source`, on `device`. Other ranks give one of the same shape and type, any kind."""
        message = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if self.rank == source:
            message.copy_(tensor)
        with self._answer_expected():
            dist.broadcast(message, src=source)
        return message

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank. What the other ranks pass is ignored, and may be of another type."""
        return self.gather(value)[0]

    def rows_of_rank(self, count: int) -> Tensor:
        """Which of the rows 0 .. count - 1 this rank computes where the work is divided."""
        return torch.arange(count).tensor_split(self.size)[self.rank]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the ranks.

        The gradients are changed in place, because recorded CUDA graphs write them to fixed addresses. They are sent in
        flat messages: one message per tensor (878 of them) takes 35 ms instead of 7 on two H200s. There are several
        messages, because a full GPU has no room for a copy of all gradients. A parameter that has no gradient on any
        rank stays without one: with a gradient of 0, AdamW would still decay it, unlike a single process.
        """
        if self.size == 1:
            return
        has_gradient = self.gather([parameter.grad is not None for parameter in parameters])  # by rank
        gradients: list[Tensor] = []
        for parameter, on_each_rank in zip(parameters, zip(*has_gradient, strict=True), strict=True):
            if any(on_each_rank):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        with self._answer_expected():
            for message in _take_tensors(gradients, BYTES_PER_MESSAGE):
                flat = _flatten_dense_tensors(message)
                dist.all_reduce(flat)
                torch._foreach_copy_(message, _unflatten_dense_tensors(flat, message))

    def check_same_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise SelfCheckError unless all ranks hold the same float32 parameters.

        What is compared is each tensor's checksum, the sum of its bits read as integers.
        """
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
        """Wait for the other ranks at the end of a run, and close the connection to them."""
        if self.size > 1:
            self.gather(None)
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _answer_expected(self) -> Iterator[None]:
        """Turn communication errors within the block into RanksLost."""
        try:
            yield
        except torch.OutOfMemoryError:  # this rank's own fault, although it is a RuntimeError
            raise
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise RanksLost(
                f"rank {self.rank}: another rank has stopped (its own message says why) or did not answer in time "
                f"({first_line(error)})"
            ) from error


ALONE = Ranks()


def join_ranks(device: torch.device | str) -> Ranks:
    """Connect to the other ranks, and make this rank's GPU the current one. Returns ALONE for a single process.

    Raises BadInput when the other ranks cannot be reached.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    on_gpu = torch.cuda.is_available() and torch.device("cuda" if device == "auto" else device).type == "cuda"
    try:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
        objects = dist.new_group(backend="gloo", timeout=PATIENCE)
        # NCCL allocates memory with the first message. Send one now, before free memory is measured.
        dist.all_reduce(torch.zeros(1, device="cuda" if on_gpu else "cpu"))
    except (RuntimeError, ValueError) as error:
        raise BadInput(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot reach the others ({first_line(error)}): "
            "start as many processes on every machine, with the same MASTER_ADDR and MASTER_PORT"
        ) from None
    return Ranks(dist.get_rank(), dist.get_world_size(), objects)  # type: ignore[arg-type]  # never outside the group
