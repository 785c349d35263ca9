"""BDDL files of others: what LIBERO ships is read, mistakes are named in one line, nothing in a file is executed."""

import pytest

from contracts import BadInput
from envs.bddl import read_instruction
from envs.tasks import libero_root

STOVE = libero_root() / "bddl_files" / "libero_goal" / "turn_on_the_stove.bddl"


@pytest.fixture
def refusal(tmp_path):
    """The one line with which LIBERO's file is refused after `old` in it has become `new`."""

    def message(old: str, new: str) -> str:
        text = STOVE.read_text().lower()
        assert old in text
        (tmp_path / "own.bddl").write_text(text.replace(old, new, 1))
        with pytest.raises(BadInput, match=r"own\.bddl") as caught:
            read_instruction(tmp_path / "own.bddl")
        return str(caught.value)

    return message


def test_all_files_that_libero_ships_are_read():
    files = sorted((libero_root() / "bddl_files").rglob("*.bddl"))
    assert len(files) >= 130
    assert all(read_instruction(path) for path in files)
    assert read_instruction(STOVE) == "turn on the stove"


@pytest.mark.parametrize(
    "expression",
    ["__import__", "9**9", "np.pi", "0x10", "nan", "1_000", "[0]", "-", "1e", "007", "\u0663", "1e400"],
)
def test_numbers_are_plain_numbers_because_libero_evaluates_them(refusal, expression):
    assert "needs plain numbers" in refusal("(3.141592653589793 3.141592653589793)", f"({expression} 3.14)")


def test_a_mistake_of_structure_is_named(refusal):
    assert "parentheses" in refusal("(define", "((define")
    assert ":language" in refusal("(:language turn on the stove)", "")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"()", b"(define 1)", b"hello", b"(" * 40_000 + b")" * 40_000]
)
def test_what_is_no_bddl_at_all_is_refused(tmp_path, content):
    (tmp_path / "odd.bddl").write_bytes(content)
    with pytest.raises(BadInput, match=r"odd\.bddl"):
        read_instruction(tmp_path / "odd.bddl")
