"""A refusal is one line; JSON files are whole; a pointer names a checkpoint."""

import errno
import json
from dataclasses import dataclass
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from contracts import BadInput, output_place, read_fields, read_json, resolve_pointer, write_json


@given(st.text())
def test_every_message_is_one_line(message):
    assert len(str(BadInput(message)).splitlines()) <= 1


@pytest.mark.parametrize(
    "content", [None, b"{half", b"\xff", b"[]", b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_what_is_no_json_object_is_refused_with_the_name_of_the_file(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=f"^{path}: "):
        read_json(path)


@dataclass
class Part:
    sizes: tuple[int, ...]


@dataclass
class Kind:
    count: Annotated[int, Field(ge=1)]
    parts: dict[str, Part]


def test_a_file_is_read_as_what_is_declared_and_a_wrong_field_is_named(tmp_path):
    path = tmp_path / "a.json"
    whole = {"count": 3, "parts": {"a": {"sizes": [1], "more": 2}}, "unknown": [None]}
    path.write_text(json.dumps(whole))
    assert read_fields(path, Kind) == Kind(3, {"a": Part((1,))})
    assert read_fields(path, int, part="count") == 3
    for changes, field in (
        ({"count": "3"}, "count"),
        ({"count": 0}, "count"),
        ({"parts": {"a": {}}}, "parts.a.sizes"),
    ):
        path.write_text(json.dumps(whole | changes))
        with pytest.raises(BadInput, match=f"^{path}: {field}: .*; make it again$"):
            read_fields(path, Kind, "make it again")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_only_what_cannot_be_written_is_a_problem_of_the_output_place(tmp_path):
    with pytest.raises(BadInput, match="--out"), output_place(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), output_place(tmp_path / "out"):
        raise PermissionError(errno.EACCES, "Permission denied", "/base/config.json")
    with pytest.raises(BadInput, match="--out"), output_place(tmp_path / ("long" * 100)):
        pass


def test_a_pointer_names_the_checkpoint_beside_it_and_all_else_is_kept(tmp_path):
    (tmp_path / "best").write_text("step_300\n")
    (tmp_path / "notes").write_text("../elsewhere")
    assert resolve_pointer(tmp_path / "best") == tmp_path / "step_300"
    for path in (tmp_path / "notes", tmp_path / "step_300", tmp_path):
        assert resolve_pointer(path) == path
