"""docs/FAULTS.md claims nothing without a test: its numbers, its list of tests and the tests agree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "FAULTS.md").read_text()
TABLE = [line for line in TEXT.splitlines() if line.startswith("|")]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
NUMBERED = [int(number) for number in re.findall(r"^(\d+)\. `tests/", TEXT, re.MULTILINE)]


def test_every_named_test_exists():
    missing = []
    for path, name in NAMED:
        tree = ast.parse((ROOT / path).read_text())
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{path}::{name}")
    assert missing == []
    assert len(NAMED) >= len(NUMBERED) > 50


def test_every_number_of_the_table_is_a_test_and_every_test_is_in_the_table():
    used = {int(number) for line in TABLE for number in re.findall(r"\[(\d+)\]", line)}
    assert list(range(1, len(NUMBERED) + 1)) == NUMBERED
    assert used == set(NUMBERED)


def test_every_fault_has_an_answer_for_every_phase():
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE]
    assert {len(row) for row in rows} == {7}
    assert all(cell for row in rows for cell in row)
