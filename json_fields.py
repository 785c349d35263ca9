"""Read small JSON files and check the types of their fields: one reader for all files that others may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from contracts import BadInput, read_bytes, read_json

T = TypeVar("T")


def read_fields(path: Path, kind: type[T], advice: str = "", part: str | None = None) -> T:
    """Read a JSON file, or only its field `part`. Raises BadInput that names the file and the first wrong field.

    kind: a dataclass with the fields that the caller reads, or a dict[str, ...]; other fields are ignored. A type may
    be `Annotated` with a pydantic `Field` that holds bounds, and `__post_init__` may raise ValueError. advice: what the
    user can do about a wrong field.
    """
    value = read_json(path)
    if part is None:
        return _checked(json.dumps(value), TypeAdapter(kind), f"{path}: ", advice)
    return _checked(json.dumps(value.get(part)), TypeAdapter(kind), f"{path}: {part}: ", advice)


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Read a file with a JSON object in each line, as `read_fields` does. A last line that was cut is left out."""
    *lines, last_line = read_bytes(path).split(b"\n")
    if last_line.strip().endswith(b"}"):  # otherwise it is empty or cut
        lines.append(last_line)
    adapter = TypeAdapter(kind)
    return [
        _checked(line, adapter, f"{path}, line {line_number}: ")
        for line_number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _checked(text: str | bytes, adapter: TypeAdapter[T], source: str, advice: str = "") -> T:
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        raise BadInput(f"{source}{first_problem(error)}{advice and '; '}{advice}") from None


def first_problem(error: ValidationError) -> str:
    """The first wrong field, what it holds and what was expected."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{field} is missing"
    expected = first["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
    if first["type"] in ("value_error", "json_invalid"):  # the message says what was found
        return f"{field}: {expected}" if field else expected
    return f"{field or 'it'} is {first['input']!r:.80}: {expected}"
