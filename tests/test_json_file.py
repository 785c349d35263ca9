"""Every defect of a JSON file is one line that names the file or field."""

import pytest

from errors import BadInput
from untrusted.json_file import as_numbers, brief, read_json, required


def test_an_object_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"é": [1, 2.5]}', encoding="utf-8")
    assert read_json(path) == {"é": [1, 2.5]}


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"a": 1} x', b"\xff\xfe\x00", b"[" * 100_000, b"null"])
def test_anything_but_a_json_object_is_refused(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.json") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["missing.json", ""])
def test_a_missing_file_and_a_folder_are_refused(tmp_path, name):
    with pytest.raises(BadInput, match="cannot be read"):
        read_json(tmp_path / name)


def test_a_missing_field_is_named_with_what_there_is():
    with pytest.raises(BadInput, match=r"^here: .*'size'.*colour, shape"):
        required({"shape": 1, "colour": 2}, "size", "here")


def test_numbers_become_floats():
    assert as_numbers([1, 2.5], "here", 2) == [1.0, 2.5]


@pytest.mark.parametrize("value", [None, 3, "12", [], ["1"], [True], [float("inf")], [float("nan")], [10**400], [[1]]])
def test_anything_but_finite_numbers_is_refused(value):
    with pytest.raises(BadInput, match=r"^here: expected a list of finite numbers"):
        as_numbers(value, "here")


def test_a_wrong_number_of_numbers_says_both():
    with pytest.raises(BadInput, match="expected 7 numbers, found 2"):
        as_numbers([1, 2], "here", 7)


def test_brief_keeps_messages_short():
    assert len(brief(list(range(1000)))) == 80
    assert brief([1]) == "[1]"


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '{"a": "\\ud800"}', '{"a": ' + "7" * 1_000_000 + "}", '{"a":' * 50_000]
)
def test_what_other_programs_would_read_otherwise_or_never_is_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"a\.json: is not valid JSON"):
        read_json(path)
