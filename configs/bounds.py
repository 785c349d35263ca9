"""Allowed ranges of numeric settings, written at their fields: `lr: Annotated[float, POSITIVE] = 1e-6`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_type_hints

from contracts import BadInput

TOO_LARGE = 2**63  # JSON, numpy and torch hold numbers of 64 bits


@dataclass(frozen=True)
class Range:
    """The range of numbers that a setting may have."""

    above: float = -math.inf  # this number itself is not allowed
    least: float = -math.inf
    most: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.above < number and self.least <= number <= self.most

    def __str__(self) -> str:
        bounds = {"above": self.above, "at least": self.least, "at most": self.most}
        return " and ".join(f"{side} {bound:g}" for side, bound in bounds.items() if math.isfinite(bound))


POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(least=0)
POSITIVE_SHARE = Range(above=0, most=1)
SHARE = Range(least=0, most=1)


def check_numbers(settings: object) -> None:
    """Raise BadInput if a number in a dataclass, alone or in a tuple, is outside the range at its field."""
    for name, bounds in _ranges(type(settings)).items():
        flag = f"--{name.replace('_', '-')}"
        for value in _numbers_in(getattr(settings, name)):
            if not abs(value) < TOO_LARGE:  # NaN and infinity are refused, too
                raise BadInput(f"{flag} must be a number of at most 64 bits, got {value}")
            if value not in bounds:
                raise BadInput(f"{flag} must be {bounds}, got {value}")


def _ranges(settings: type) -> dict[str, Range]:
    """The range of each field that has one."""
    ranges = {}
    for name, annotation in get_type_hints(settings, include_extras=True).items():
        for note in getattr(annotation, "__metadata__", ()):
            if isinstance(note, Range):
                ranges[name] = note
    return ranges


def _numbers_in(value: object) -> Iterator[int | float]:
    """The value, or the elements of a tuple, as far as they are numbers."""
    for element in value if isinstance(value, tuple) else (value,):
        if isinstance(element, int | float) and not isinstance(element, bool):
            yield element
