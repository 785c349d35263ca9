"""Read small JSON files and check the types of their fields: one reader for all files that others may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from contracts import BadInput, read_bytes

T = TypeVar("T")


def read_fields(path: Path, kind: type[T], advice: str = "") -> T:
    """Read a JSON file as `kind`. Raises BadInput that names the file and the first wrong field.

    kind: a dataclass with the fields that the caller reads, or a dict[str, ...]; other fields are ignored. A type may
    be `Annotated` with a pydantic `Field` that holds bounds, and `__post_init__` may raise ValueError. advice: what the
    user can do about a wrong field.
    """
    return _parsed(read_bytes(path), TypeAdapter(kind), str(path), advice)


def read_lines(path: Path, kind: type[T], advice: str = "") -> list[T]:
    """Read a file with a JSON object in each line, as `read_fields` does. A last line that was cut is left out."""
    lines = read_bytes(path).split(b"\n")
    last_line = lines[-1].strip()  # empty, unless it does not end with a newline
    if last_line and not last_line.endswith(b"}"):
        lines.pop()
    adapter = TypeAdapter(kind)
    return [
        _parsed(line, adapter, f"{path}, line {line_number}", advice)
        for line_number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def check_fields(value: object, kind: type[T], source: str, advice: str = "") -> T:
    """Convert a value that was read from JSON to `kind`: see `read_fields`. source: what the message calls it."""
    return _parsed(json.dumps(value).encode(), TypeAdapter(kind), source, advice)


def _parsed(text: bytes, adapter: TypeAdapter[T], source: str, advice: str) -> T:
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        problem = f"{source}: {first_problem(error)}"
        raise BadInput(f"{problem}; {advice}" if advice else problem) from None


def first_problem(error: ValidationError) -> str:
    """The first wrong field, what it holds and what was expected."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{field} is missing"
    expected = first["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
    return f"{field} is {first['input']!r:.80}: {expected}" if field else expected
