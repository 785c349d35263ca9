"""A refusal is one line that a terminal shows as it is."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import BadInput, read_json, write_json


@given(st.text())
def test_every_message_is_one_line(message):
    assert len(str(BadInput(message)).splitlines()) <= 1


def test_a_message_crosses_processes_unchanged():
    error = BadInput("a\nb")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a b"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"{half", "is no JSON"),
        (b"[]", "expected a JSON object"),
    ],
)
def test_what_is_no_json_object_is_one_line_that_names_the_file(tmp_path, content, said):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
