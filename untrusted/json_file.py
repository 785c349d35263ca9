"""Reading JSON files so that every defect names the file and the field."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from errors import BadInput
from untrusted.plain_file import read_text


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that the file holds. Raises BadInput when it is missing, no JSON, or not an object."""
    return as_object(parse_json(read_text(path), str(path)), str(path))


def parse_json(text: str, where: str) -> Any:
    """A JSON document. `where` opens the message of the BadInput when it is none that everybody reads alike."""
    try:
        content = json.loads(text, object_pairs_hook=_object)
        if "\\u" in text:
            json.dumps(content, ensure_ascii=False).encode()  # half a character cannot be written anywhere
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: is not valid JSON ({error}); download or copy the file again") from error
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without a name that occurs twice: programs differ in which one they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {brief(twice)} occurs twice in an object")
    return found


def as_object(value: Any, where: str) -> dict[str, Any]:
    """`value` if it is a JSON object; `where` (file and field) opens the message of the BadInput otherwise."""
    if not isinstance(value, dict):
        raise BadInput(f"{where}: expected a JSON object, found {brief(value)}")
    return value


def required(entry: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in entry:
        raise BadInput(f"{where}: lacks the field {name!r}; found {', '.join(sorted(entry)) or 'nothing'}")
    return entry[name]


def as_numbers(value: Any, where: str, length: int | None = None) -> list[float]:
    """A non-empty JSON list of finite numbers, of this length if one is given."""
    if not isinstance(value, list) or not value or not all(is_finite_number(x) for x in value):
        raise BadInput(f"{where}: expected a list of finite numbers, found {brief(value)}")
    if length is not None and len(value) != length:
        raise BadInput(f"{where}: expected {length} numbers, found {len(value)}")
    return [float(x) for x in value]


def is_finite_number(value: Any) -> bool:
    """True and False are no numbers."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # JSON allows integers beyond the range of float64
        return False


def brief(value: Any) -> str:
    """The value on one short line, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
