"""The reader of small files: what it accepts is unchanged, what it refuses is named by file and field."""

import json
from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import Field

from contracts import BadInput
from json_fields import read_fields, read_lines


@dataclass
class Part:
    sizes: tuple[int, ...]


@dataclass
class Kind:
    count: Annotated[int, Field(ge=1, le=10)]
    rate: float | None = None
    parts: dict[str, Part] | None = None


WHOLE = {"count": 3, "rate": 1, "parts": {"a": {"sizes": [1], "more": 2}}, "unknown": [None]}


def test_a_whole_file_is_read_and_what_nobody_declared_is_left_out(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(WHOLE))
    assert read_fields(path, Kind) == Kind(3, 1.0, {"a": Part((1,))})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"count": "3"}, "count"),
        ({"count": True}, "count"),
        ({"count": 100000}, "count"),
        ({"rate": "fast"}, "rate"),
        ({"parts": {"a": {}}}, "parts.a.sizes"),
        ({"parts": {"a": {"sizes": [1, 0.5]}}}, "parts.a.sizes.1"),
        ({"parts": []}, "parts"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(changes, field, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(WHOLE | changes))
    with pytest.raises(BadInput, match=f"^{path}: {field} .*; make it again$"):
        read_fields(path, Kind, "make it again")


def test_lines_are_read_up_to_one_that_was_cut(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"count": count, "text": "\u2028"}, ensure_ascii=False) for count in (1, 2, 3)]
    path.write_text("\n\n".join(lines)[:-4])
    assert [value.count for value in read_lines(path, Kind)] == [1, 2]
    path.write_text("\n".join(lines))
    assert [value.count for value in read_lines(path, Kind)] == [1, 2, 3]


@pytest.mark.parametrize("broken", ['{"count": ', "7", '{"count": 0}', "[" * 100_000])
def test_a_broken_line_is_named(broken, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"count": 1}}\n{broken}\n{{"count": 2}}\n')
    with pytest.raises(BadInput, match=f"^{path}, line 2: "):
        read_lines(path, Kind)


def test_a_pointer_of_git_lfs_is_called_by_its_name(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    for read in (read_fields, read_lines):
        with pytest.raises(BadInput, match="git lfs pull"):
            read(path, Kind)
