"""Read a BDDL file as what it is: text from anywhere, checked before LIBERO sees it.

LIBERO's reader evaluates the numbers of a :yaw_rotation as Python and answers most mistakes with a KeyError deep in the
simulator. Here every word is looked at first; what can only be known with LIBERO's objects at hand is left to
`envs.simulator`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import BadInput
from untrusted.plain_file import read_text

MAX_BYTES = 100_000  # LIBERO's longest has 6,000
NAME = re.compile(r"[a-z_][a-z0-9_]*")
# A number to Python, too: no leading zeros, no digits of other scripts.
NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]{1,2})?")
ARGUMENTS = {"on": 2, "in": 2, "open": 1, "close": 1, "turnon": 1, "turnoff": 1, "up": 1}
REGION_NUMBERS = {":ranges": 4, ":yaw_rotation": 2}  # per entry
OTHER_GROUPS = ("problem", ":domain", ":requirements")
SECTIONS = (":language", ":regions", ":fixtures", ":objects", ":obj_of_interest", ":init", ":goal")


@dataclass(frozen=True)
class Problem:
    """What the rest of the program wants to know about a BDDL file."""

    kind: str  # LIBERO's class of scene, lower case: libero_tabletop_manipulation, ...
    instruction: str
    categories: tuple[str, ...]  # of objects and fixtures


def read_problem(path: Path) -> Problem:
    """Read and check a BDDL file. Raises BadInput, naming the file and what is wrong in it."""
    text = read_text(path, MAX_BYTES)  # line ends as LIBERO will see them: they end comments
    try:
        return _problem(text)
    except _Wrong as wrong:
        raise BadInput(f"BDDL file {path}: {wrong}") from None


class _Wrong(Exception):
    """What is wrong with the text."""


def _problem(text: str) -> Problem:
    from bddl.parsing import scan_tokens  # LIBERO's own; here, so that a missing LIBERO is told by envs.tasks

    try:
        expression = scan_tokens(string=text)
    except Exception as fault:  # the parser raises nothing more special
        raise _Wrong(f"{fault} (count the parentheses)") from None
    if not isinstance(expression, list) or expression[:1] != ["define"]:
        raise _Wrong("it does not begin with (define (problem ...) ... (:language ...) ...)")
    groups = [group for group in expression[1:] if isinstance(group, list) and group and isinstance(group[0], str)]
    sections = {group[0]: group[1:] for group in groups}
    missing = [name for name in ("problem", *SECTIONS) if name not in sections]
    if missing:
        raise _Wrong(f"it has no ({missing[0]} ...)")
    # LIBERO would evaluate all sections of one name, of which only the last one is checked here.
    if len(sections) != len(expression) - 1 or not sections.keys() <= {*OTHER_GROUPS, *SECTIONS}:
        raise _Wrong(f"it may have ({') ('.join((*OTHER_GROUPS, *SECTIONS))}), each once, and nothing else")
    if len(sections["problem"]) != 1 or not sections[":language"]:
        raise _Wrong("(problem NAME) and (:language SENTENCE) each need a value")
    if sections.get(":domain", ["robosuite"]) != ["robosuite"]:
        raise _Wrong(f"its domain is {_shown(sections[':domain'])}, LIBERO's is (robosuite)")

    fixtures, objects = _declared(sections[":fixtures"], ":fixtures"), _declared(sections[":objects"], ":objects")
    declared = {**fixtures, **objects}
    regions = _regions(sections[":regions"], declared)
    for name in sections[":obj_of_interest"]:
        _known(name, {*declared, *regions}, ":obj_of_interest")
    for fact in sections[":init"]:
        _check_fact(fact, {*declared, *regions}, ":init")
    _check_placed(objects, sections[":init"])
    for fact in _conjunction(sections[":goal"]):
        _check_fact(fact, {*declared, *regions}, ":goal")
    return Problem(
        kind=_word(sections["problem"][0], "problem"),
        instruction=" ".join(_plain(word) for word in sections[":language"]),
        categories=tuple(dict.fromkeys(declared.values())),
    )


def _declared(words: Sequence[Any], section: str) -> dict[str, str]:
    """`a b - bowl  c - plate` -> {a: bowl, b: bowl, c: plate}."""
    found: dict[str, str] = {}
    waiting: list[str] = []
    rest = iter(words)
    for word in rest:
        if word != "-":
            waiting.append(_word(word, section))
            continue
        category = _word(next(rest, ""), section)
        found |= dict.fromkeys(waiting, category)
        waiting = []
    if waiting:
        raise _Wrong(f"{section}: {waiting[0]} has no category (write: {waiting[0]} - CATEGORY)")
    return found


def _regions(entries: Sequence[Any], declared: dict[str, str]) -> set[str]:
    """Full names, `<target>_<region>`, of the regions of what is declared; all numbers are plain numbers."""
    names = set()
    for entry in entries:
        if not isinstance(entry, list) or not entry:
            raise _Wrong(f":regions: {_shown(entry)} is no (NAME (:target ...) ...)")
        region = _word(entry[0], ":regions")
        attributes = {
            part[0]: part[1:] for part in entry[1:] if isinstance(part, list) and part and isinstance(part[0], str)
        }
        unknown = attributes.keys() - {":target", ":rgba", *REGION_NUMBERS}
        if unknown or len(attributes) != len(entry) - 1 or len(attributes.get(":target", ())) != 1:
            raise _Wrong(
                f"region {region} needs (:target X); it may have (:ranges ...), (:yaw_rotation ...), (:rgba ...)"
            )
        target = _word(attributes[":target"][0], f"region {region}: :target")
        for name, count in REGION_NUMBERS.items():
            for row in _rows(attributes.get(name, ([],)), f"region {region}: {name}"):
                _numbers(row, count, f"region {region}: {name}")
        for row in attributes.get(":rgba", ()):
            _numbers(row, 4, f"region {region}: :rgba")
        if target in declared:  # LIBERO's own files have leftovers, which do no harm as long as nothing names them
            names.add(f"{target}_{region}")
    return names


def _rows(value: Sequence[Any], where: str) -> list[Any]:
    if len(value) != 1 or not isinstance(value[0], list):
        raise _Wrong(f"{where} needs one pair of parentheses around its rows")
    return value[0]


def _numbers(row: Any, count: int, where: str) -> None:
    plain = isinstance(row, list) and all(isinstance(word, str) and NUMBER.fullmatch(word) for word in row)
    if not plain or len(row) != count:
        raise _Wrong(f"{where} needs ({count} numbers), found {_shown(row)}")
    if where.endswith(":ranges") and not (float(row[0]) <= float(row[2]) and float(row[1]) <= float(row[3])):
        raise _Wrong(f"{where} is (x_min y_min x_max y_max), found {_shown(row)}")


def _conjunction(goal: Sequence[Any]) -> Sequence[Any]:
    if len(goal) != 1 or not isinstance(goal[0], list) or not goal[0]:
        raise _Wrong(":goal needs one (And (...) ...)")
    return goal[0][1:] if goal[0][0] == "and" else goal


def _check_fact(fact: Any, known: set[str], section: str) -> None:
    word = fact[0] if isinstance(fact, list) and fact and isinstance(fact[0], str) else None
    if word not in ARGUMENTS or len(fact) != 1 + ARGUMENTS[word]:
        forms = ", ".join(f"({name} {' '.join('XY'[:count])})" for name, count in ARGUMENTS.items())
        raise _Wrong(f"{section}: {_shown(fact)} is none of {forms}")
    for name in fact[1:]:
        _known(name, known, f"{section} {_shown(fact)}")


def _check_placed(objects: dict[str, str], facts: Sequence[Any]) -> None:
    placed = {fact[1] for fact in facts if fact[0] in ("on", "in")}
    if missing := [name for name in objects if name not in placed]:
        raise _Wrong(f":init does not say where {missing[0]} is (add: (On {missing[0]} REGION))")


def _known(name: Any, known: Any, where: str) -> None:
    if not isinstance(name, str) or name not in known:
        raise _Wrong(f"{where} names {_shown(name)}, but the file has only {', '.join(sorted(known))}")


def _word(value: Any, where: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise _Wrong(f"{where}: {_shown(value)} is no name")
    return value


def _plain(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise _Wrong(f":language: {_shown(value)} is no word")
    return value


def _shown(value: Any, depth: int = 3) -> str:
    """A part of the file as BDDL, shortened: messages are one line."""
    if isinstance(value, list):
        value = f"({' '.join(_shown(part, depth - 1) for part in value[:20])})" if depth else "(...)"
    text = "".join(c if c.isprintable() else "?" for c in value[:100])
    return text if len(text) <= 60 else text[:57] + "..."
