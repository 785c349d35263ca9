"""One policy on several devices of one host: its first device, and a replica in a process of its own on each other.

Processes, because threads do not help: the interpreter lets one of them at a time launch kernels, and the network
launches thousands of small ones.

`Replicas` splits a batch along its rows, gathers the outputs on the first device (with autograd), adds up gradients
once per optimizer step and passes the new parameters on. Replicas never compute parameters, they copy them: they stay
equal to the first device's bit for bit.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parameters_to_vector

from child_process import end_child, start_child
from vla.memory import limit_memory
from vla.observation import Observation, PlainObservation
from vla.policy import Policy
from vla.replica import Backward, Exchange, Forward, Outputs, Recompute, Start, as_array, split_like
from vla.turns import new_turn, record, wait_for

LOAD_S = 3600.0  # for a replica to read the checkpoint, 15 GB, from wherever it lies
ANSWER_S = 600.0  # for anything else; the first forward pass may compile
FAREWELL_S = 120  # for the program to say that a replica is gone and to end, where wandb may take 60 of them

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
        policy.replicas = Replicas(parameters, devices[1:], {"checkpoint": checkpoint, **options}, memory_budget)
    return policy


class Replicas:
    """The first device's side. Waits are bounded; a replica that dies, hangs or raises is an error of the caller."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        devices: Sequence[torch.device | str],
        load: dict[str, Any],
        memory_budget: float | None,
    ):
        """parameters: the first device's trainable ones; load: arguments of Policy.load but the device."""
        self._parameters: list[Tensor] = list(parameters)
        # The one memory that all devices see: gradients come, and parameters go, through it, one user at a time.
        self._exchange = torch.empty(sum(p.numel() for p in parameters), device=parameters[0].device).share_memory_()
        self._parts = split_like(self._exchange, parameters)
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._graph_names = itertools.count()
        self._turn = new_turn(self._exchange.device)
        self._handles = [_Handle(torch.device(device), new_turn(self._exchange.device)) for device in devices]
        self.close = weakref.finalize(self, _end_all, self._handles)  # at the latest when the interpreter exits
        for handle in self._handles:
            options = {**load, "device": str(handle.device)}
            threads = torch.get_num_threads()
            handle.send(Start(options, memory_budget, threads, self._exchange, self._turn, handle.turn))
        for handle in self._handles:
            handle.receive(LOAD_S)
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
        graph = _Graph(next(self._graph_names), [handle for handle, _ in at_work])
        for handle, rows in at_work:
            part = [_plain(observations[row]) for row in rows]
            name = graph.name if torch.is_grad_enabled() else None
            alive = frozenset(kept.name for kept in self._graphs)
            handle.send(Forward(part, as_teacher, needs_hidden, name, alive))
        logits, hidden = own_outputs([observations[row] for row in own])
        answers = [handle.receive(ANSWER_S) for handle, _ in at_work]
        if not answers:
            return logits, hidden
        self._graphs.add(graph)
        return _Gather.apply(graph, answers, logits, hidden if needs_hidden else None)

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
            handle.receive(ANSWER_S)

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

    def _ask_for_vector(self, handle: _Handle, request: Exchange) -> None:
        """What the first device is asked next finds the replica's vector in the exchange memory."""
        record(self._turn, self._exchange.device)
        handle.ask(request)
        wait_for(handle.turn, self._exchange.device)

    def _wait_for_replicas(self) -> None:
        """What the first device is asked next comes after all that replicas do with the exchange memory."""
        for handle in self._handles:
            wait_for(handle.turn, self._exchange.device)


class _Graph:
    """Names the parts of one forward pass that the replicas keep; they are freed when nobody holds this any more."""

    def __init__(self, name: int, handles: Sequence[_Handle]):
        self.name = name
        self.handles = handles


class _Gather(torch.autograd.Function):
    """All devices' outputs, one below the other; the gradient goes back to where each came from."""

    @staticmethod
    def forward(
        ctx: Any, graph: _Graph, answers: Sequence[Outputs], logits: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        ctx.sizes = [len(logits), *(len(answer.logits) for answer in answers)]
        all_logits = _below(logits, [answer.logits for answer in answers])
        if hidden is None:
            return all_logits, None
        return all_logits, _below(hidden, [answer.hidden for answer in answers if answer.hidden is not None])

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logits: Tensor | None, hidden: Tensor | None
    ) -> tuple[None, None, Tensor | None, Tensor | None]:
        own_logits, *logits_parts = _parts(logits, ctx.sizes)
        own_hidden, *hidden_parts = _parts(hidden, ctx.sizes)
        # Sent before the first device's own backward pass begins, so that all run at the same time.
        for handle, *gradients in zip(ctx.graph.handles, logits_parts, hidden_parts, strict=True):
            arrays = [None if gradient is None else as_array(gradient) for gradient in gradients]
            handle.send(Backward(ctx.graph.name, *arrays))
            handle.has_gradient = True
        return None, None, own_logits, own_hidden


def _below(own: Tensor, others: Sequence[np.ndarray]) -> Tensor:
    return torch.cat([own, *(torch.from_numpy(other).to(own) for other in others)])


def _parts(gradient: Tensor | None, sizes: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if gradient is None else gradient.split(sizes)


def _plain(observation: Observation) -> PlainObservation:
    """Of a class that a replica knows."""
    return PlainObservation(observation.images, observation.proprio, observation.instruction, observation.prepared)


class _Handle:
    """The connection to one replica."""

    def __init__(self, device: torch.device, turn: torch.cuda.Event | None):
        """turn: the replica's on the exchange memory."""
        self.device, self.turn = device, turn
        self.has_gradient = False  # that no `reduce_gradients` has fetched
        self.process, self.connection = start_child("vla.replica", ANSWER_S)
        with suppress(OSError):
            self.connection.send_bytes(multiprocessing.current_process().authkey)

    def ask(self, request: Recompute | Exchange) -> None:
        self.send(request)
        self.receive(ANSWER_S)

    def send(self, request: Start | Forward | Backward | Recompute | Exchange) -> None:
        with suppress(OSError):  # it has died: the next receive() finds out
            self.connection.send(request)

    def receive(self, timeout_s: float) -> Outputs | None:
        """The answer to the oldest request. Raises what the replica raised, RuntimeError when it is dead or hangs."""
        try:
            return self._receive(timeout_s)
        except Exception:  # whatever it is, the replica has ended
            end_in_any_case(self.device)
            raise

    def _receive(self, timeout_s: float) -> Outputs | None:
        where = f"the policy's replica on {self.device}"
        try:
            if not self.connection.poll(timeout_s):
                raise TimeoutError
            answer = self.connection.recv()
        except (TimeoutError, BlockingIOError):  # the latter: stopped in the middle of an answer
            ending = end_child(self.process, show_stack=True)
            raise RuntimeError(f"{where} gave no answer in {timeout_s:.0f} s ({ending}): see its stack above") from None
        except (EOFError, OSError):
            ending = end_child(self.process)
            hint = "its last words are above; if there are none, the system ended it, perhaps for want of memory"
            raise RuntimeError(f"{where} died ({ending}): {hint}") from None
        if isinstance(answer, Exception):
            raise type(answer)(f"{where}: {answer}")
        return answer


def _end_all(handles: Sequence[_Handle]) -> None:
    """Idle replicas go by themselves, at the end of the connection; one at work when it is done, or is killed."""
    for handle in handles:
        if handle.process.poll() is not None:  # perhaps by the signal that ends this program, too
            end_in_any_case(handle.device)
        handle.connection.close()
    for handle in handles:
        end_child(handle.process)


def end_in_any_case(device: torch.device) -> None:
    """A replica on `device` is gone: let the program end, by SIGALRM if it has not ended otherwise FAREWELL_S from now.

    If the replica's turn (vla.turns) had not come to its end, the first GPU waits for it for ever. So does every call
    that waits for that GPU, and among them may be those with which libraries take their leave at a program's end. Seen
    on H200s after three of nine kills in the middle of an update. A signal without a handler ends what hangs in any
    library.
    """
    if device.type == "cuda" and signal.getitimer(signal.ITIMER_REAL)[0] == 0:  # once: not later at the second call
        signal.alarm(FAREWELL_S)
