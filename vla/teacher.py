"""The three kinds of teacher that a policy, the student, can have.

The student imitates its teacher in the warmup. A teacher is frozen, and is one of
  * `WithoutAdapters`: the student's network as it was pretrained; the default, which costs no memory;
  * `SwappedAdapter`: the student's network with another adapter; a copy of the trainable parameters;
  * `SecondNetwork`: another policy, a second network in memory.

Each has two methods. `acting` is a block in which the policy that it gives decides as the teacher; blocks may be
nested. `equals_student` says whether the student's weights still equal the teacher's.

No teacher keeps a reference to the student: in a reference cycle, a deleted policy's GPU memory would not be freed at
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Generic, TypeVar

import torch
from torch import Tensor

from vla.adapter_folder import StoredAdapter, copy_into_network
from vla.model import OpenVLAOFT

PolicyT = TypeVar("PolicyT")  # `vla.policy.Policy`, which imports this module


class WithoutAdapters:
    """The student's network without adapters, and with the pretrained proprio projector."""

    def __init__(self, network: OpenVLAOFT):
        """network: the student's, not trained yet."""
        self._network = network
        self._proprio_projector = deepcopy(network.proprio_projector)

    @contextmanager
    def acting(self, student: PolicyT) -> Iterator[PolicyT]:
        network = self._network
        students_projector = network.proprio_projector
        network.proprio_projector = self._proprio_projector
        try:
            with network.adapters.disabled():
                yield student
        finally:
            network.proprio_projector = students_projector

    def equals_student(self) -> bool:
        if any(layer.lora_B.any() for _, layer in self._network.adapters.layers):
            return False
        projector = self._network.proprio_projector
        if projector is None or self._proprio_projector is None:
            return True
        return all(map(torch.equal, projector.parameters(), self._proprio_projector.parameters()))


class SwappedAdapter:
    """The student's network, with another adapter's values in its trainable parameters while the teacher acts."""

    def __init__(self, parameters: Sequence[Tensor], values: Sequence[Tensor]):
        """parameters: the student's; values: the teacher's, in the same order."""
        self._parameters = list(parameters)
        self._values = list(values)

    @contextmanager
    def acting(self, student: PolicyT) -> Iterator[PolicyT]:
        with torch.no_grad():
            students_values = [parameter.detach().clone() for parameter in self._parameters]
            torch._foreach_copy_(self._parameters, self._values)
        try:
            yield student
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, students_values)

    def equals_student(self) -> bool:
        return all(map(torch.equal, self._parameters, self._values))


def adapter_as_teacher(
    adapter: StoredAdapter, network: OpenVLAOFT, parameters: Sequence[Tensor]
) -> SwappedAdapter:
    """The student's network with a stored adapter's values. parameters: all that the student trains."""
    students_values = [parameter.detach().clone() for parameter in parameters]
    copy_into_network(adapter, network)
    teachers_values = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        torch._foreach_copy_(list(parameters), students_values)
    return SwappedAdapter(parameters, teachers_values)


class SecondNetwork(Generic[PolicyT]):
    """Another policy, whose inputs and outputs are of the same kind as the student's."""

    def __init__(self, policy: PolicyT):
        self._policy = policy

    @contextmanager
    def acting(self, student: PolicyT) -> Iterator[PolicyT]:
        yield self._policy

    def equals_student(self) -> bool:
        return False
