"""The policy on a further device: the program of its process, and the requests that it answers.

A replica loads the checkpoint by itself. Requests and observations come as messages. What the network computes with
travels through memory of the first device that the replica has mapped: trainable parameters and their gradients
(`Start.exchange`), outputs and theirs (`Forward.transit`). The graph of a forward pass stays here until the gradient of
its outputs comes.

Every request is answered: by None when the GPUs have been asked to do it, which says nothing of when they will have
done it (vla.turns), or by the error that ends the replica.
"""

from __future__ import annotations

import math
import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing  # teaches Connection to send a tensor as a handle to its memory
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from contracts import Observation
from errors import BadInput
from vla.memory import limit_memory
from vla.policy import Policy
from vla.turns import record, wait_for


@dataclass(frozen=True)
class Start:
    load: dict[str, Any]  # arguments of Policy.load
    memory_budget: float | None  # GiB of the GPU; None: all
    num_threads: int  # of torch
    exchange: Tensor  # float32 (N,), of the first device: one element for each trainable one
    turn: torch.cuda.Event | None  # of the first device on all that it shares (vla.turns)
    own_turn: torch.cuda.Event | None  # of this replica


@dataclass(frozen=True)
class Forward:
    """Write logits (B, A, 256), behind them hidden states (B, A, D) if needed, from the begin of the transit memory."""

    observations: Sequence[Observation]
    as_teacher: bool
    needs_hidden: bool
    graph: int | None  # the name under which `Backward` will ask for it; None: without gradient
    alive: frozenset[int]  # graphs whose gradient may still be asked for; all others are freed
    transit: Tensor | None  # float32 (M,), of the first device, from now on; None: as before


@dataclass(frozen=True)
class Backward:
    """Gradients lie where `Forward` has written a graph's outputs, of those that the loss reads."""

    graph: int
    reads: Sequence[bool]  # logits; hidden states


@dataclass(frozen=True)
class Recompute:
    num_blocks: int


class Exchange(Enum):
    GIVE_GRADIENT = "write the accumulated gradient, and start again from zero"
    TAKE_PARAMETERS = "read the trainable parameters; the accumulated gradient is forgotten"
    GIVE_PARAMETERS = "write the trainable parameters"


def main(socket_fd: int) -> None:
    """The process: one request after the other, until `None`, a fault or the end of the connection."""
    connection = Connection(socket_fd)
    try:
        # Memory of a CPU travels as a file descriptor, which multiprocessing hands out for this key only.
        multiprocessing.current_process().authkey = connection.recv_bytes()
        serve(connection)
    except (EOFError, ConnectionError):  # the first device's process is gone
        pass


def serve(connection: Connection) -> None:
    replica: Replica | None = None
    while (request := connection.recv()) is not None:
        try:
            if isinstance(request, Start):
                replica = Replica(request)
            else:
                assert replica is not None, "the first request is Start"
                replica.run(request)
        except Exception as error:
            connection.send(as_fault(error))
            return
        connection.send(None)


def as_fault(error: Exception) -> Exception:
    """What the first device raises in place of `error`."""
    if isinstance(error, BadInput):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(str(error).splitlines()[0])
    traceback.print_exception(error)
    return RuntimeError(traceback.format_exception_only(error)[-1].strip())


class Replica:
    """The whole policy on one further device. The gradients of its trainable parameters are parts of one vector."""

    def __init__(self, start: Start):
        self._device = torch.device(start.load["device"])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        limit_memory(start.memory_budget, self._device)
        torch.set_num_threads(start.num_threads)
        self._policy = Policy.load(**start.load)
        self._policy.action_head = None  # the first device applies it to the gathered hidden states
        self._exchange, self._turn, self._own_turn = start.exchange, start.turn, start.own_turn
        self._parameters: list[Tensor] = [parameter for _, parameter in self._policy.named_trainable_parameters()]
        self._gradient = torch.zeros(sum(p.numel() for p in self._parameters), device=self._device)
        self._gradients = views(self._gradient, [parameter.shape for parameter in self._parameters])
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient  # backward passes add to it in place
        self._graphs: dict[int, list[Tensor]] = {}  # logits and, if needed, hidden states
        self._transit = torch.empty(0)

    def run(self, request: Forward | Backward | Recompute | Exchange) -> None:
        if isinstance(request, Recompute):
            self._policy.recompute(request.num_blocks)
        elif isinstance(request, Forward):
            self._forward(request)
        elif isinstance(request, Backward):
            self._backward(request)
        else:
            with self._in_turn():
                self._exchange_vector(request)

    def _forward(self, request: Forward) -> None:
        self._graphs = {name: outputs for name, outputs in self._graphs.items() if name in request.alive}
        self._transit = self._transit if request.transit is None else request.transit
        who = self._policy.teacher() if request.as_teacher else nullcontext()
        with torch.set_grad_enabled(request.graph is not None), who:
            logits, hidden = self._policy.chunk_outputs(request.observations)
        assert hidden is not None, "this device has its own"
        outputs = [logits, hidden] if request.needs_hidden else [logits]
        if request.graph is not None and logits.requires_grad:
            self._graphs[request.graph] = outputs
        with torch.no_grad(), self._in_turn():
            for place, output in zip(views(self._transit, [x.shape for x in outputs]), outputs, strict=True):
                place.copy_(output)  # float32 holds bfloat16 exactly

    def _backward(self, request: Backward) -> None:
        outputs = self._graphs.pop(request.graph)
        with self._in_turn():
            # First to this device, which then rounds: kernels on the first one would stand in the way of its own.
            arrived = [place.to(self._device) for place in views(self._transit, [x.shape for x in outputs])]
        given = [
            (output, x.to(output))
            for output, x, is_read in zip(outputs, arrived, request.reads, strict=True)
            if is_read
        ]
        torch.autograd.backward([output for output, _ in given], [gradient for _, gradient in given])

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Copies between the GPUs: they come after, and before, what the first device has been and will be asked."""
        wait_for(self._turn, self._exchange.device)
        yield
        record(self._own_turn, self._exchange.device)

    @torch.no_grad()
    def _exchange_vector(self, request: Exchange) -> None:
        if request is Exchange.TAKE_PARAMETERS:
            # Between optimizer steps the gradient's memory is free: no other is taken on a device that may be full.
            self._gradient.copy_(self._exchange)
            # In place, which also tells layers that keep something made of their parameters.
            torch._foreach_copy_(self._parameters, self._gradients)
            self._gradient.zero_()
        elif request is Exchange.GIVE_PARAMETERS:
            self._exchange.copy_(parameters_to_vector(self._parameters))
        else:
            self._exchange.copy_(self._gradient)
            self._gradient.zero_()


def views(vector: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The begin of (N,), one view after the other."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(*shape) for part, shape in zip(vector[: sum(sizes)].split(sizes), shapes, strict=True)]
