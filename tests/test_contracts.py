"""A refusal is one line; JSON files are whole; one program at a time writes; a pointer names a checkpoint."""

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import (
    BadInput,
    lock_file,
    locked,
    output_place,
    read_json,
    resolve_pointer,
    unfinished_folder,
    write_json,
)


@given(st.text())
def test_every_message_is_one_line(message):
    assert len(str(BadInput(message)).splitlines()) <= 1


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


def test_a_second_program_is_refused_while_the_first_one_runs(tmp_path):
    """That a lock ends with a killed program is in test_faults.py."""
    path = tmp_path / "new" / "lock"
    with locked(path, "the run"), pytest.raises(BadInput, match="the run"):
        lock_file(path, "the run")
    with locked(path, "the run"):
        pass
    assert not path.exists()


def test_two_programs_do_not_write_one_folder(tmp_path):
    out = tmp_path / "new" / "out"
    with unfinished_folder(out) as folder:
        (folder / "first").touch()
        with pytest.raises(BadInput, match="by another program"), unfinished_folder(out):
            pass
    with pytest.raises(BadInput, match="exists already"), unfinished_folder(out):
        pass
    assert [path.name for path in out.parent.rglob("*")] == ["out", "first"]


def test_a_pointer_names_the_checkpoint_beside_it_and_all_else_is_kept(tmp_path):
    (tmp_path / "best").write_text("step_300\n")
    (tmp_path / "notes").write_text("../elsewhere")
    assert resolve_pointer(tmp_path / "best") == tmp_path / "step_300"
    for path in (tmp_path / "notes", tmp_path / "step_300", tmp_path):
        assert resolve_pointer(path) == path
