"""One policy on several devices of one host: its first device, and a replica in a process of its own on each other.

Processes, because threads do not help: the interpreter lets one of them at a time launch kernels, and the network
launches thousands of small ones.

`Replicas` splits a batch along its rows, gathers the outputs on the first device (with autograd), adds up gradients
once per optimizer step and passes the new parameters on. Replicas never compute parameters, they copy them: they stay
equal to the first device's bit for bit.

The GPUs wait for one another, Python only for the word that a GPU has been asked: it is ahead of them, and they never
wait for it between a forward pass and its backward pass.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parameters_to_vector

from contracts import Observation
from vla.memory import limit_memory
from vla.policy import Policy
from vla.replica import Backward, Exchange, Forward, Recompute, Start, views
from vla.replica_handle import ReplicaHandle, end_all
from vla.tokens import NUM_BINS
from vla.turns import new_turn, record, wait_for

LOAD_S = 3600.0  # for a replica to read the checkpoint, 15 GB, from wherever it lies

OutputsOf = Callable[[Sequence[Observation]], tuple[Tensor, Tensor]]


def load_data_parallel(
    checkpoint: str, devices: Sequence[torch.device | str], *, memory_budget: float | None = None, **options: Any
) -> Policy:
    """`Policy.load` on the first of `devices`, with a replica on each other; one device: the plain policy.

    memory_budget: GiB that tensors may take on each GPU; options: all other arguments of Policy.load. Raises BadInput,
    torch.OutOfMemoryError (of any device) and RuntimeError when a replica cannot be started.
    """
    for device in devices:  # of the others here only whether they have as much
        limit_memory(memory_budget, torch.device(device))
    policy = Policy.load(checkpoint, device=devices[0], **options)
    if len(devices) > 1:
        parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
        row = policy.chunk_length * policy.action_dim * (NUM_BINS + policy.hidden_dim)
        policy.replicas = Replicas(parameters, devices[1:], {"checkpoint": checkpoint, **options}, memory_budget, row)
    return policy


class Replicas:
    """The first device's side. Waits are bounded; a replica that dies, hangs or raises is an error of the caller."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        devices: Sequence[torch.device | str],
        load: dict[str, Any],
        memory_budget: float | None,
        row: int,
    ):
        """parameters: the first device's trainable ones; load: arguments of Policy.load but the device; row: how many
        numbers an observation's logits and hidden states are."""
        self._row = row
        self._parameters: list[Tensor] = list(parameters)
        # Memory that all devices see: gradients come, and parameters go, through it, one user at a time.
        self._exchange = torch.empty(sum(p.numel() for p in parameters), device=parameters[0].device).share_memory_()
        self._parts = views(self._exchange, [parameter.shape for parameter in parameters])
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._graph_names = itertools.count()
        self._turn = new_turn(self._exchange.device)
        self._handles = [ReplicaHandle(torch.device(device), new_turn(self._exchange.device)) for device in devices]
        self.close = weakref.finalize(self, end_all, self._handles)  # at the latest when the interpreter exits
        for handle in self._handles:
            options = {**load, "device": str(handle.device)}
            threads = torch.get_num_threads()
            handle.send(Start(options, memory_budget, threads, self._exchange, self._turn, handle.turn))
        for handle in self._handles:
            handle.catch_up(LOAD_S)
        self.broadcast_parameters()

    @property
    def devices(self) -> list[torch.device]:
        """All, the first one included."""
        return [self._exchange.device, *(handle.device for handle in self._handles)]

    def chunk_outputs(
        self, own_outputs: OutputsOf, observations: Sequence[Observation], as_teacher: bool, needs_hidden: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (B, A, 256) and, if needed, hidden states (B, A, D) on the first device, with gradient.

        own_outputs: the same of the first device alone. A single observation is its own affair.
        """
        own, *others = (list(part) for part in np.array_split(np.arange(len(observations)), len(self.devices)))
        at_work = [(handle, rows) for handle, rows in zip(self._handles, others, strict=True) if rows]
        sizes = [len(own), *(len(rows) for _, rows in at_work)]
        graph = _Graph(next(self._graph_names), self._turn, [handle for handle, _ in at_work], sizes)
        for handle, rows in at_work:
            part = [_plain(observations[row]) for row in rows]
            name = graph.name if torch.is_grad_enabled() else None
            alive = frozenset(kept.name for kept in self._graphs)
            transit = handle.transit_for(len(rows) * self._row, self._exchange.device)
            handle.send(Forward(part, as_teacher, needs_hidden, name, alive, transit))
        logits, hidden = own_outputs([observations[row] for row in own])
        if not at_work:
            return logits, hidden
        for handle, _ in at_work:
            handle.catch_up()
        self._graphs.add(graph)
        if needs_hidden:
            return _Gather.apply(graph, logits, hidden)
        return *_Gather.apply(graph, logits), None

    def recompute(self, num_blocks: int) -> None:
        """See `Policy.recompute`."""
        for handle in self._handles:
            handle.ask(Recompute(num_blocks))

    def reduce_gradients(self) -> None:
        """Add the replicas' gradients to those of the first device's parameters; the replicas' start again from 0.

        A parameter without gradient is not part of the loss, on any device: it keeps having none.
        """
        parts = zip(self._parameters, self._parts, strict=True)
        reached = [(p.grad, part) for p, part in parts if p.grad is not None]
        self._wait_for_replicas()
        for handle in self._handles:
            if handle.has_gradient:
                self._ask_for_vector(handle, Exchange.GIVE_GRADIENT)
                torch._foreach_add_(*map(list, zip(*reached, strict=True)))
                handle.has_gradient = False

    @torch.no_grad()
    def broadcast_parameters(self) -> None:
        """Give the replicas the first device's trainable parameters. Gradients that were not reduced are lost there."""
        self._wait_for_replicas()
        torch._foreach_copy_(self._parts, self._parameters)
        record(self._turn, self._exchange.device)
        for handle in self._handles:
            handle.send(Exchange.TAKE_PARAMETERS)
        for handle in self._handles:
            handle.catch_up()

    def are_equal(self) -> bool:
        """Whether every replica's trainable parameters are the first device's, bit for bit."""
        own = parameters_to_vector(self._parameters).detach().view(torch.int32)
        self._wait_for_replicas()
        for handle in self._handles:
            self._exchange.zero_()  # a copy that does not arrive must not find what it should have brought
            self._ask_for_vector(handle, Exchange.GIVE_PARAMETERS)
            if not torch.equal(self._exchange.view(torch.int32), own):
                return False
        return True

    def _ask_for_vector(self, handle: ReplicaHandle, request: Exchange) -> None:
        """What the first device is asked next finds the replica's vector in the exchange memory."""
        record(self._turn, self._exchange.device)
        handle.ask(request)
        wait_for(handle.turn, self._exchange.device)

    def _wait_for_replicas(self) -> None:
        """What the first device is asked next comes after all that replicas do with the exchange memory."""
        for handle in self._handles:
            wait_for(handle.turn, self._exchange.device)


@dataclass(eq=False)
class _Graph:
    """One forward pass. The replicas keep their parts of it until nobody holds this any more."""

    name: int
    turn: torch.cuda.Event | None  # the first device's
    handles: Sequence[ReplicaHandle]  # of the replicas that take part
    sizes: Sequence[int]  # rows of the first device and of each of them


class _Gather(torch.autograd.Function):
    """All devices' outputs, one below the other; the gradient goes back to where each came from."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, *own: Tensor) -> tuple[Tensor, ...]:
        """own: the first device's logits and, if needed, hidden states."""
        ctx.set_materialize_grads(False)
        ctx.graph, ctx.of_row = graph, [output.shape[1:] for output in own]
        parts = [own]
        for handle, size in zip(graph.handles, graph.sizes[1:], strict=True):
            wait_for(handle.turn, handle.transit.device)
            parts.append(tuple(views(handle.transit, [(size, *shape) for shape in ctx.of_row])))
        gathered = tuple(torch.cat([part.to(of_all[0]) for part in of_all]) for of_all in zip(*parts, strict=True))
        record(graph.turn, own[0].device)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        graph = ctx.graph
        split = [[None] * len(graph.sizes) if g is None else g.split(graph.sizes) for g in gradients]
        own, *others = zip(*split, strict=True)
        # Sent before the first device's own backward pass begins, so that all run at the same time.
        for handle, size, parts in zip(graph.handles, graph.sizes[1:], others, strict=True):
            handle.catch_up()  # the gradient before this one has been read
            wait_for(handle.turn, handle.transit.device)
            for place, part in zip(views(handle.transit, [(size, *shape) for shape in ctx.of_row]), parts, strict=True):
                if part is not None:
                    place.copy_(part)
            record(graph.turn, handle.transit.device)
            handle.send(Backward(graph.name, [part is not None for part in parts]))
            handle.has_gradient = True
        return None, *own


def _plain(observation: Observation) -> Observation:
    """Of a class that a replica knows."""
    return Observation(observation.images, observation.proprio, observation.instruction, observation.prepared)
