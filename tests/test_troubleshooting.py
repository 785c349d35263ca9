"""docs/TROUBLESHOOTING.md promises nothing that is not there: tests, messages, flags."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
TEXT = (PROJECT / "docs" / "TROUBLESHOOTING.md").read_text()
OF_PIP = {"--upgrade"}


@cache
def sources() -> list[ast.Module]:
    parts = [
        PROJECT.glob("*.py"),
        *((PROJECT / part).rglob("*.py") for part in ("vla", "envs", "rl", "configs", "untrusted")),
    ]
    return [ast.parse(path.read_text()) for part in parts for path in part]


@cache
def printed() -> list[str]:
    """All texts of the program, with … for what an f-string fills in."""
    texts = []
    for node in (node for source in sources() for node in ast.walk(source)):
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


@cache
def fields() -> set[str]:
    nodes = (node for source in sources() for node in ast.walk(source) if isinstance(node, ast.AnnAssign))
    return {f"--{node.target.id.replace('_', '-')}" for node in nodes if isinstance(node.target, ast.Name)}


def messages() -> list[str]:
    """What stands in backticks in the first column of the table of messages."""
    table = TEXT.split("| message | do this |")[1].split("\n\n")[0]
    cells = [row.removeprefix("| ").rsplit(" | ", 1)[0] for row in table.splitlines()[2:]]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def test_every_test_that_is_named_exists():
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT))
    assert len(named) > 80
    for path, test in sorted(named):
        functions = {node.name for node in ast.walk(ast.parse((PROJECT / path).read_text())) if "name" in node._fields}
        assert test in functions, f"{path}::{test}"


def test_every_trouble_has_a_test():
    rows = [row for row in TEXT.split("\n### ", 1)[1].splitlines() if row.startswith("| ")]
    troubles = [row for row in rows if not row.startswith("| trouble |")]
    assert len(troubles) > 40
    assert not [row for row in troubles if "::test_" not in row]


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_that_the_program_prints(message):
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in printed()), message


def test_every_flag_exists():
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", TEXT)) - OF_PIP
    assert len(flags) > 25
    assert not flags - fields()
