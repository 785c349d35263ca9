"""Values that were stored and read again, against the types of a dataclass' fields."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST_INT = 2**63 - 1  # what torch and numpy take


def check_types(kind: type, values: Mapping[str, Any]) -> None:
    """Raise TypeError for a value that is not of the type of its field in the dataclass `kind`.

    Lists pass for tuples, as JSON has no tuples. Names that are no field are not looked at.
    """
    for name, hint in get_type_hints(kind).items():
        if name in values and not _fits(values[name], hint):
            found = repr(values[name])
            raise TypeError(f"{name} is {found if len(found) <= 60 else found[:57] + '...'}, expected {_name(hint)}")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        return isinstance(value, list | tuple) and _fit_items(value, arguments)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(item, arguments[i]) for pair in value.items() for i, item in enumerate(pair)
        )
    if hint is int:
        return type(value) is int and abs(value) <= LARGEST_INT
    if hint is float:
        return _fits(value, int) or (isinstance(value, float) and not math.isnan(value))
    return isinstance(value, hint)


def _fit_items(values: list[Any] | tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if hints[-1] is Ellipsis:
        return all(_fits(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(_fits(value, hint) for value, hint in zip(values, hints, strict=True))


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint).replace("typing.", "")
