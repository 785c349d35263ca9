"""BDDL files of others: what LIBERO ships is read, mistakes are named in one line, nothing in a file is executed."""

import pytest

from contracts import BadInput
from envs.bddl import read_instruction
from envs.tasks import libero_root

STOVE = libero_root() / "bddl_files" / "libero_goal" / "turn_on_the_stove.bddl"


def test_all_files_that_libero_ships_are_read():
    files = sorted((libero_root() / "bddl_files").rglob("*.bddl"))
    assert len(files) >= 130
    assert all(read_instruction(path) for path in files)
    assert read_instruction(STOVE) == "turn on the stove"


def refuse(path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(BadInput, match=path.name):
        read_instruction(path)


@pytest.mark.parametrize("expression", ["__import__", "9**9", "np.pi", "0x10", "nan", "1_000"])
def test_numbers_are_plain_numbers_because_libero_evaluates_them(tmp_path, expression):
    text = STOVE.read_text().replace("(3.141592653589793 3.14", f"({expression} 3.14", 1)
    assert expression in text
    refuse(tmp_path / "own.bddl", text.encode())


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"(define 1)", b"(" + STOVE.read_bytes()])
def test_what_is_no_task_is_refused(tmp_path, content):
    refuse(tmp_path / "own.bddl", content)
