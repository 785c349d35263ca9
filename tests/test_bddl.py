"""BDDL files of others: what LIBERO ships is read, mistakes are named in one line, nothing in a file is executed."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.bddl import read_problem
from envs.tasks import libero_root
from errors import BadInput
from tests.fuzzing.env_readers import libero_reader
from tests.fuzzing.formats import CODE_WORD, MARKER

STOVE = libero_root() / "bddl_files" / "libero_goal" / "turn_on_the_stove.bddl"


@pytest.fixture
def said(tmp_path):
    """The one line with which LIBERO's file is refused after `old` in it has become `new`."""

    def refusal(old: str, new: str) -> str:
        text = STOVE.read_text().lower()
        assert old in text
        (tmp_path / "own.bddl").write_text(text.replace(old, new, 1))
        with pytest.raises(BadInput) as caught:
            read_problem(tmp_path / "own.bddl")
        message = str(caught.value)
        assert "\n" not in message
        assert "own.bddl" in message
        return message

    return refusal


def test_all_files_that_libero_ships_are_read():
    files = sorted((libero_root() / "bddl_files").rglob("*.bddl"))
    problems = [read_problem(path) for path in files]
    assert len(problems) >= 130
    assert all(problem.kind.startswith("libero_") and problem.instruction for problem in problems)


def test_instruction_scene_and_categories_come_from_the_file():
    problem = read_problem(STOVE)
    assert problem.kind == "libero_tabletop_manipulation"
    assert problem.instruction == "turn on the stove"
    assert {"table", "wooden_cabinet", "flat_stove", "akita_black_bowl"} <= set(problem.categories)


@pytest.mark.parametrize(
    "expression", ["__import__", "9**9**9**9", "np.pi", "0x10", "nan", "inf", "1_000", "[0]", "-", "1e", "", "pi"]
)
def test_numbers_are_plain_numbers_because_libero_evaluates_them(said, expression):
    assert "needs (2 numbers)" in said("(3.141592653589793 3.141592653589793)", f"({expression} 3.14)")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("(define", "((define", "parenthesis"),
        ("(:goal", "(:gaol", "has no (:goal"),
        ("(:language turn on the stove)", "(:language)", "(:language SENTENCE)"),
        ("(:language turn on the stove)", "", "has no (:language"),
        ("turnon flat_stove_1", "turnon flat_stove_2", ":goal (turnon flat_stove_2) names flat_stove_2"),
        ("turnon flat_stove_1", "on flat_stove_1", "is none of (on X Y)"),
        ("turnon flat_stove_1", "ignite flat_stove_1", "is none of"),
        ("(and (turnon", "(or (turnon", ":goal: (or (turnon flat_stove_1)) is none of"),
        ("- wine_rack", "", "wine_rack_1 has no category"),
        ("(on plate_1 main_table_plate_region)", "", "does not say where plate_1 is"),
        ("main_table_plate_region)", "main_table_dish_region)", "names main_table_dish_region"),
    ],
)
def test_a_mistake_is_named(said, old, new, expected):
    assert expected in said(old, new)


def test_a_range_whose_minimum_is_above_its_maximum_is_refused(tmp_path, said):
    row = re.search(r":ranges \(\s*\(([-\d. ]+)\)", STOVE.read_text().lower())[1]
    x_min, y_min, x_max, y_max = row.split()
    assert "(x_min y_min x_max y_max)" in said(f"({row})", f"({x_max} {y_min} {x_min} {y_max})")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"(" * 5000, b"()", b"a" * 200_000, b"(define 1)"])
def test_what_is_no_bddl_at_all_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "odd.bddl").write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_problem(tmp_path / "odd.bddl")
    assert "\n" not in str(caught.value)


@given(start=st.integers(0, 3000), length=st.integers(0, 60), junk=st.text("()-: a0.\n\x00é;", max_size=20))
def test_damage_anywhere_ends_in_a_problem_or_one_line(tmp_path_factory, start, length, junk):
    path = tmp_path_factory.getbasetemp() / "damaged.bddl"
    text = STOVE.read_text()
    path.write_text(text[:start] + junk + text[start + length :])
    message = ""
    try:
        read_problem(path)
    except BadInput as problem:
        message = str(problem)
    assert "\n" not in message


REGION = f"(:regions (r (:target flat_stove_1) (:yaw_rotation (({CODE_WORD} 0)))))"


@pytest.mark.parametrize("hidden", [f"; a comment\r{REGION}\n", REGION], ids=["behind a carriage return", "twice"])
def test_code_that_only_libero_would_see_is_found(tmp_path, monkeypatch, hidden):
    monkeypatch.chdir(tmp_path)
    text = STOVE.read_text().lower()
    end = text.index("(:fixtures")
    (tmp_path / "own.bddl").write_bytes((text[:end] + hidden + text[end:]).encode())
    with pytest.raises(BadInput, match=r"own\.bddl"):
        read_problem(tmp_path / "own.bddl")
    assert not (tmp_path / MARKER).exists()
    libero_reader().robosuite_parse_problem(str(tmp_path / "own.bddl"))
    assert (tmp_path / MARKER).exists()  # the code works: what held it back was the check


@pytest.mark.parametrize("number", ["007", "\u0663", "1e400", "0x10"])
def test_numbers_that_python_does_not_take_for_numbers_are_refused(said, number):
    assert "needs (2 numbers)" in said("(3.141592653589793 3.141592653589793)", f"({number} 3.14)")


def test_parentheses_as_deep_as_they_fit_are_refused_in_one_line(said):
    assert "is none of" in said("(turnon flat_stove_1)", "(" * 40_000 + ")" * 40_000)
