"""Check a user's BDDL file before LIBERO reads it.

LIBERO evaluates the numbers of a :yaw_rotation as Python code, so a file could execute anything. It also accepts names
of objects that do not exist.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from contracts import BadInput, first_line

# A number that Python accepts, too: no leading zeros, no digits of other scripts.
NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]{1,2})?")
SECTIONS = ("problem", ":language", ":regions", ":fixtures", ":objects", ":init", ":goal")


def read_instruction(path: Path) -> str:
    """Check a BDDL file; returns its instruction. Raises BadInput, which names the file and what is wrong in it."""
    # This is LIBERO's own parser. Import it here, because `envs.tasks` is the one to report a missing LIBERO.
    from bddl.parsing import scan_tokens

    try:
        # Read the file as text: line ends are then the same as for LIBERO.
        expression = scan_tokens(string=path.read_text(encoding="utf-8"))
        return _instruction(expression)
    except (OSError, BadInput) as fault:
        raise BadInput(f"BDDL file {path}: {fault}") from None
    except Exception as fault:  # raised by the parser, or where a list is missing
        reason = f"{type(fault).__name__}: {first_line(fault)}"
        raise BadInput(
            f"BDDL file {path}: its structure is not that of LIBERO's own files ({reason}); count the parentheses"
        ) from None


def _instruction(expression: list) -> str:
    """Check a whole parsed file; returns its instruction. Raises BadInput."""
    _check_rotations(expression)
    sections = {group[0]: group[1:] for group in expression[1:]}
    for name in SECTIONS:
        if not sections.get(name):
            raise BadInput(f"it has no ({name} ...)")
    objects = _declared(sections[":objects"])
    fixtures = _declared(sections[":fixtures"])
    regions = [f"{dict(attributes)[':target']}_{name}" for name, *attributes in sections[":regions"]]
    known = {*objects, *fixtures, *regions}
    (goal,) = sections[":goal"]
    _check_names(":init", sections[":init"], known)
    _check_names(":goal", goal[1:] if goal[0] == "and" else [goal], known)
    placed = {fact[1] for fact in sections[":init"]}
    for name in objects:
        if name not in placed:
            raise BadInput(f":init does not say where {name} is (add: (On {name} REGION))")
    return " ".join(sections[":language"])


def _check_rotations(expression: list) -> None:
    for rotation in _groups(expression, ":yaw_rotation"):
        if not all(NUMBER.fullmatch(word) for word in _words(rotation[1:])):
            raise BadInput(f"({' '.join(_words(rotation))}) needs plain numbers: LIBERO evaluates them")


def _check_names(section: str, facts: Sequence[list], known: set[str]) -> None:
    for fact in facts:
        for name in fact[1:]:
            if name not in known:
                listing = ", ".join(sorted(known))
                raise BadInput(f"{section} ({' '.join(_words(fact))}) names {name}; there are {listing}")


def _declared(words: Sequence[str]) -> list[str]:
    """The names that a list of objects or fixtures declares: `a b - bowl  c - plate` -> [a, b, c]."""
    return [word for previous, word in pairwise(["", *words]) if "-" not in (previous, word)]


def _groups(expression: list | str, name: str) -> Iterator[list]:
    """All lists that begin with `name`, at any depth of the expression."""
    if isinstance(expression, list):
        if expression[:1] == [name]:
            yield expression
        for part in expression:
            yield from _groups(part, name)


def _words(expression: list | str) -> list[str]:
    """All words of nested lists, in the order of the text."""
    if not isinstance(expression, list):
        return [expression]
    return [word for part in expression for word in _words(part)]
