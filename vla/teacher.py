"""The two kinds of teacher that a policy, the student, can have.

The student imitates its teacher in the warmup. A teacher is frozen, and is one of
  * `WithoutAdapters`: the student's network as it was pretrained; the default, which costs no memory;
  * `Snapshot`: the student's network with the values that its trainable parameters had when training began, for a
    student that starts from a trained adapter.

Each has two methods. `acting` is a block in which the student's network computes what the teacher does; blocks may be
nested. `equals_student` says whether the student's weights still equal the teacher's.

No teacher keeps a reference to the student: in a reference cycle, a deleted policy's GPU memory would not be freed at
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor

from vla.model import OpenVLAOFT


class WithoutAdapters:
    """The student's network without adapters, and with the pretrained proprio projector."""

    def __init__(self, network: OpenVLAOFT):
        """network: the student's, not trained yet."""
        self._network = network
        self._proprio_projector = deepcopy(network.proprio_projector)

    @contextmanager
    def acting(self) -> Iterator[None]:
        network = self._network
        students_projector = network.proprio_projector
        network.proprio_projector = self._proprio_projector
        try:
            with network.adapters.disabled():
                yield
        finally:
            network.proprio_projector = students_projector

    def equals_student(self) -> bool:
        if any(layer.lora_B.any() for _, layer in self._network.adapters.layers):
            return False
        projector = self._network.proprio_projector
        if projector is None or self._proprio_projector is None:
            return True
        return all(map(torch.equal, projector.parameters(), self._proprio_projector.parameters()))


class Snapshot:
    """The student's network, with the present values of its trainable parameters while the teacher acts."""

    def __init__(self, parameters: Sequence[Tensor]):
        """parameters: all that the student trains."""
        self._parameters = list(parameters)
        self._values = [parameter.detach().clone() for parameter in parameters]

    @contextmanager
    def acting(self) -> Iterator[None]:
        with torch.no_grad():
            students_values = [parameter.detach().clone() for parameter in self._parameters]
            torch._foreach_copy_(self._parameters, self._values)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, students_values)

    def equals_student(self) -> bool:
        return all(map(torch.equal, self._parameters, self._values))
