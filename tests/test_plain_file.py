"""Only plain files of a bounded size are read."""

import os

import pytest

from errors import BadInput
from untrusted.plain_file import check_plain, read_bytes, read_text


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "a").write_bytes(b"a\r\nb\rc\n\xc3\xa9")
    assert read_bytes(tmp_path / "a") == b"a\r\nb\rc\n\xc3\xa9"
    assert read_text(tmp_path / "a") == (tmp_path / "a").read_text(encoding="utf-8")
    assert check_plain(tmp_path / "a") == 9


def test_a_link_to_a_file_is_followed(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to("a")
    assert read_text(tmp_path / "link") == "x"


def _folder(path):
    path.mkdir()


def _endless(path):
    path.symlink_to("/dev/zero")


def _circle(path):
    path.symlink_to(path.name)


def _hole(path):
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("make", [lambda path: None, _folder, os.mkfifo, _endless, _circle, _hole])
def test_what_is_no_plain_file_of_a_bounded_size_is_refused_at_once(tmp_path, make):
    make(tmp_path / "odd")
    with pytest.raises(BadInput, match=r"odd: cannot be read \("):
        read_bytes(tmp_path / "odd", most=1000)


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    for name in ("a\0b", "a" * 300):
        with pytest.raises(BadInput, match="cannot be read"):
            read_bytes(tmp_path / name)


def test_a_limit_is_inclusive(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", most=5) == b"12345"
    with pytest.raises(BadInput, match="more than 4 bytes"):
        read_bytes(tmp_path / "a", most=4)


def test_other_encodings_are_refused(tmp_path):
    (tmp_path / "a").write_bytes("é".encode("latin1"))
    with pytest.raises(BadInput, match="no text in UTF-8"):
        read_text(tmp_path / "a")
