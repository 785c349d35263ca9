"""Read small JSON files and check the types of their fields: one reader for all files that others may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from contracts import BadInput, read_json, refuse_lfs_pointer

T = TypeVar("T")


def read_fields(path: Path, kind: type[T], advice: str = "") -> T:
    """Read a JSON file and check its fields. Raises BadInput that names the file and the first wrong field.

    kind: a `typing_extensions.TypedDict` (typing's own is too old in Python 3.10) or a dict[str, ...], with the fields
    that the caller reads. A type may be `Annotated` with a pydantic `Field` that holds bounds. Other fields are kept as
    they are. advice: what the user can do about a wrong field.
    """
    return check_fields(read_json(path), kind, str(path), advice)


def read_lines(path: Path, kind: type[T], advice: str = "") -> list[T]:
    """Read a file with one JSON object in each line, as `read_fields` does. A cut-off last line is left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise BadInput(f"{path}: is not UTF-8 text ({error})") from None
    refuse_lfs_pointer(path)
    adapter = TypeAdapter(kind)
    values = []
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        source = f"{path}, line {line_number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if line_number == len(lines):  # it does not end with a newline: a kill has cut it
                break
            raise BadInput(_sentence(source, f"is not valid JSON ({error})", advice)) from None
        values.append(_checked(value, adapter, source, advice))
    return values


def check_fields(value: object, kind: type[T], source: str, advice: str = "") -> T:
    """Check a value that was read from JSON and return it: see `read_fields`. source: what the message calls it."""
    return _checked(value, TypeAdapter(kind), source, advice)


def _checked(value: object, adapter: TypeAdapter[T], source: str, advice: str) -> T:
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        raise BadInput(_sentence(source, first_problem(error), advice)) from None
    return cast(
        T, value
    )  # not what pydantic returns, because that lacks the fields that `kind` does not name


def first_problem(error: ValidationError) -> str:
    """The first wrong field, what it holds and what was expected."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"])) or "the whole"
    if first["type"] == "missing":
        return f"{field} is missing"
    expected = first["msg"].replace("Input should be", "expected")
    return f"{field} is {first['input']!r:.80}: {expected}"


def _sentence(source: str, problem: str, advice: str) -> str:
    return f"{source}: {problem}; {advice}" if advice else f"{source}: {problem}"
