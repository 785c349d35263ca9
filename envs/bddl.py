"""Check a BDDL file, text from anywhere, before LIBERO sees it.

LIBERO evaluates the numbers of a :yaw_rotation as Python, and overlooks names of things that are not there.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from contracts import BadInput, first_line

# A number to Python, too: no leading zeros, no digits of other scripts.
NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]{1,2})?")
SECTIONS = ("problem", ":language", ":regions", ":fixtures", ":objects", ":init", ":goal")


def read_instruction(path: Path) -> str:
    """Check a BDDL file; returns its instruction. Raises BadInput, naming the file and what is wrong in it."""
    from bddl.parsing import scan_tokens  # LIBERO's own; here, so that a missing LIBERO is told by envs.tasks

    try:
        return _instruction(
            scan_tokens(string=path.read_text(encoding="utf-8"))
        )  # line ends, too, as LIBERO sees them
    except (OSError, BadInput) as fault:
        raise BadInput(f"BDDL file {path}: {fault}") from None
    except Exception as fault:  # of the parser, or no list where there should be one
        otherwise = (
            f"it is built otherwise than LIBERO's own files ({type(fault).__name__}: {first_line(fault)})"
        )
        raise BadInput(f"BDDL file {path}: {otherwise}; count the parentheses") from None


def _instruction(expression: Any) -> str:
    for rotation in _groups(expression, ":yaw_rotation"):
        if not all(map(NUMBER.fullmatch, _words(rotation[1:]))):
            raise BadInput(f"({' '.join(_words(rotation))}) needs plain numbers: LIBERO evaluates them")
    sections = {group[0]: group[1:] for group in expression[1:]}
    if missing := [name for name in SECTIONS if not sections.get(name)]:
        raise BadInput(f"it has no ({missing[0]} ...)")
    objects, fixtures = _declared(sections[":objects"]), _declared(sections[":fixtures"])
    known = {*objects, *fixtures}
    for name, *attributes in sections[":regions"]:
        known.add(f"{dict(attributes)[':target']}_{name}")
    (goal,) = sections[":goal"]
    facts = {":init": sections[":init"], ":goal": goal[1:] if goal[0] == "and" else [goal]}
    for section in facts:
        for fact in facts[section]:
            if unknown := [name for name in fact[1:] if name not in known]:
                names = ", ".join(sorted(known))
                raise BadInput(f"{section} ({' '.join(_words(fact))}) names {unknown[0]}; there are {names}")
    placed = {fact[1] for fact in facts[":init"]}
    if lost := [name for name in objects if name not in placed]:
        raise BadInput(f":init does not say where {lost[0]} is (add: (On {lost[0]} REGION))")
    return " ".join(sections[":language"])


def _declared(words: Sequence[str]) -> list[str]:
    """`a b - bowl  c - plate` -> [a, b, c]."""
    return [word for before, word in pairwise(["", *words]) if "-" not in (before, word)]


def _groups(expression: Any, name: str) -> Iterator[list]:
    """All lists that begin with `name`, wherever they are."""
    if isinstance(expression, list):
        if expression[:1] == [name]:
            yield expression
        for part in expression:
            yield from _groups(part, name)


def _words(expression: Any) -> list[str]:
    return (
        [word for part in expression for word in _words(part)]
        if isinstance(expression, list)
        else [expression]
    )
