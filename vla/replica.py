"""The policy on a further device: the program of its process, and the requests that it answers.

A replica loads the checkpoint by itself. What the first device sends afterwards are observations, gradients of outputs
and, through memory of its own that the replica has mapped (`Start.exchange`), the trainable parameters. The graph of a
forward pass stays here until the gradient of its outputs comes.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # teaches Connection to send a tensor as a handle to its memory
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from errors import BadInput
from vla.memory import limit_memory
from vla.observation import PlainObservation
from vla.policy import Policy
from vla.turns import record, wait_for


@dataclass(frozen=True)
class Start:
    load: dict[str, Any]  # arguments of Policy.load
    memory_budget: float | None  # GiB of the GPU; None: all
    num_threads: int  # of torch
    exchange: Tensor  # float32 (N,), of the first device: one element for each trainable one
    turn: torch.cuda.Event | None  # of the first device on it (vla.turns)
    own_turn: torch.cuda.Event | None  # of this replica


@dataclass(frozen=True)
class Forward:
    """Answered by `Outputs`."""

    observations: Sequence[PlainObservation]
    as_teacher: bool
    needs_hidden: bool
    graph: int | None  # the name under which `Backward` will ask for it; None: without gradient
    alive: frozenset[int]  # graphs whose gradient may still be asked for; all others are freed


@dataclass(frozen=True)
class Outputs:
    logits: np.ndarray  # float32 (B, A, 256)
    hidden: np.ndarray | None  # float32 (B, A, D)


@dataclass(frozen=True)
class Backward:
    """Gradients of a graph's outputs, of those that the loss reads. The only request without an answer."""

    graph: int
    logits: np.ndarray | None
    hidden: np.ndarray | None


@dataclass(frozen=True)
class Recompute:
    """Answered by None when done."""

    num_blocks: int


class Exchange(Enum):
    """Answered by None when the GPUs have been asked to; the replica's turn ends when they have done it."""

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
                replica, answer = Replica(request), None
            else:
                assert replica is not None, "the first request is Start"
                answer = replica.run(request)
        except Exception as error:
            connection.send(as_fault(error))
            return
        if not isinstance(request, Backward):
            connection.send(answer)


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
        self._gradients = split_like(self._gradient, self._parameters)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient  # backward passes add to it in place
        self._graphs: dict[int, tuple[Tensor, Tensor]] = {}  # logits and hidden states

    def run(self, request: Forward | Backward | Recompute | Exchange) -> Outputs | None:
        if isinstance(request, Recompute):
            self._policy.recompute(request.num_blocks)
            return None
        if isinstance(request, Forward):
            return self._forward(request)
        if isinstance(request, Backward):
            self._backward(request)
        else:
            self._exchange_vector(request)
        return None

    def _forward(self, request: Forward) -> Outputs:
        self._graphs = {name: outputs for name, outputs in self._graphs.items() if name in request.alive}
        who = self._policy.teacher() if request.as_teacher else nullcontext()
        with torch.set_grad_enabled(request.graph is not None), who:
            logits, hidden = self._policy.chunk_outputs(request.observations)
        assert hidden is not None, "this device has its own"
        if request.graph is not None and logits.requires_grad:
            self._graphs[request.graph] = logits, hidden
        return Outputs(as_array(logits), as_array(hidden) if request.needs_hidden else None)

    def _backward(self, request: Backward) -> None:
        outputs = self._graphs.pop(request.graph)
        given = [
            (output, torch.from_numpy(gradient).to(output))
            for output, gradient in zip(outputs, (request.logits, request.hidden), strict=True)
            if gradient is not None
        ]
        torch.autograd.backward([output for output, _ in given], [gradient for _, gradient in given])

    @torch.no_grad()
    def _exchange_vector(self, request: Exchange) -> None:
        # A copy between GPUs comes after, and before, what both have been asked to do.
        wait_for(self._turn, self._exchange.device)
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
        record(self._own_turn, self._exchange.device)


def split_like(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """(N,) as consecutive views in the parameters' shapes."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def as_array(tensor: Tensor) -> np.ndarray:
    """float32, which holds bfloat16 exactly."""
    return tensor.detach().float().cpu().numpy()
