"""Read a BDDL file as what it is: text from anywhere, checked before LIBERO sees it.

LIBERO's reader evaluates the numbers of a :yaw_rotation as Python, and answers most mistakes with a KeyError. Here is
checked what is evaluated and what is named; what needs LIBERO's objects at hand shows when `envs.libero` builds them.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts import BadInput, first_line

# A number to Python, too: no leading zeros, no digits of other scripts.
NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]{1,2})?")
SECTIONS = ("problem", ":language", ":regions", ":fixtures", ":objects", ":obj_of_interest", ":init", ":goal")


@dataclass(frozen=True)
class Problem:
    """What the rest of the program wants to know about a BDDL file."""

    kind: str  # LIBERO's class of scene, lower case: libero_tabletop_manipulation, ...
    instruction: str


class _Wrong(Exception):
    """What is wrong with the text."""


def read_problem(path: Path) -> Problem:
    """Read and check a BDDL file. Raises BadInput, naming the file and what is wrong in it."""
    from bddl.parsing import scan_tokens  # LIBERO's own; here, so that a missing LIBERO is told by envs.tasks

    try:
        expression = scan_tokens(string=path.read_text(encoding="utf-8"))  # line ends, too, as LIBERO will see them
    except OSError as fault:
        raise BadInput(f"BDDL file {path}: cannot be read ({fault.strerror})") from None
    except Exception as fault:  # the parser raises nothing more special
        raise BadInput(f"BDDL file {path}: {first_line(fault)} (count the parentheses)") from None
    try:
        return _problem(expression)
    except _Wrong as wrong:
        raise BadInput(f"BDDL file {path}: {wrong}") from None


def _problem(expression: Any) -> Problem:
    if not isinstance(expression, list) or expression[:1] != ["define"]:
        raise _Wrong("it does not begin with (define (problem ...) ... (:language ...) ...)")
    sections = _groups(expression[1:], "the file", SECTIONS, optional=(":domain", ":requirements"))
    kind, instruction = (" ".join(map(_shown, sections[name])) for name in ("problem", ":language"))
    if not kind or not instruction:
        raise _Wrong("(problem NAME) and (:language SENTENCE) each need a value")
    objects = _declared(sections[":objects"], ":objects")
    declared = {*objects, *_declared(sections[":fixtures"], ":fixtures")}
    known = declared | _regions(sections[":regions"], declared)
    facts, goal = sections[":init"], sections[":goal"]
    if len(goal) == 1 and isinstance(goal[0], list) and goal[0][:1] == ["and"]:
        goal = goal[0][1:]
    for section, fact in [*((":init", fact) for fact in facts), *((":goal", fact) for fact in goal)]:
        if not _is_words(fact):
            raise _Wrong(f"{section}: {_shown(fact)} is no (PREDICATE NAME ...)")
        if unknown := [name for name in fact[1:] if name not in known]:
            names = ", ".join(sorted(known))
            raise _Wrong(f"{section} {_shown(fact)} names {unknown[0]}, but the file has only {names}")
    placed = {name for fact in facts for name in fact[1:2]}
    if missing := [name for name in objects if name not in placed]:
        raise _Wrong(f":init does not say where {missing[0]} is (add: (On {missing[0]} REGION))")
    return Problem(kind, instruction)


def _groups(groups: Sequence[Any], where: str, needed: Collection[str], optional: Collection[str]) -> dict[str, list]:
    """`(a 1) (b 2)` -> {a: [1], b: [2]}. Each once: LIBERO would evaluate a second one that is not checked here."""
    found = {group[0]: group[1:] for group in groups if isinstance(group, list) and _is_words(group[:1])}
    if missing := [name for name in needed if name not in found]:
        raise _Wrong(f"{where} has no ({missing[0]} ...)")
    if len(found) != len(groups) or not found.keys() <= {*needed, *optional}:
        raise _Wrong(f"{where} may have ({') ('.join((*needed, *optional))}), each once, and nothing else")
    return found


def _declared(words: Sequence[Any], section: str) -> list[str]:
    """`a b - bowl  c - plate` -> [a, b, c]."""
    names: list[str] = []
    without_category: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "-" and next(rest, None) is not None:
            names, without_category = names + without_category, []
        else:
            without_category.append(_shown(word))
    if without_category:
        raise _Wrong(f"{section}: {without_category[0]} has no category (write: {without_category[0]} - CATEGORY)")
    return names


def _regions(entries: Sequence[Any], declared: Collection[str]) -> set[str]:
    """Full names, `<target>_<region>`, of the regions of what is declared; all numbers are plain numbers."""
    names = set()
    for entry in entries:
        if not isinstance(entry, list) or not _is_words(entry[:1]):
            raise _Wrong(f":regions: {_shown(entry)} is no (NAME (:target ...) ...)")
        where = f"region {entry[0]}"
        parts = _groups(entry[1:], where, (":target",), optional=(":ranges", ":yaw_rotation", ":rgba"))
        for part, count in ((":ranges", 4), (":yaw_rotation", 2)):
            rows = parts.get(part, [[]])
            if len(rows) != 1 or not isinstance(rows[0], list):
                raise _Wrong(f"{where}: {part} needs one pair of parentheses around its rows")
            for row in rows[0]:
                if not _is_words(row) or len(row) != count or not all(map(NUMBER.fullmatch, row)):
                    raise _Wrong(f"{where}: {part} needs ({count} numbers), found {_shown(row)}")
        target = " ".join(map(_shown, parts[":target"]))
        if target in declared:  # LIBERO's own files have leftovers, which do no harm as long as nothing names them
            names.add(f"{target}_{entry[0]}")
    return names


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(word, str) for word in value)


def _shown(value: Any) -> str:
    return f"({' '.join(map(_shown, value))})" if isinstance(value, list) else value
