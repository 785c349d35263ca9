"""The cache folder where the user's home cannot be written."""

import os
import stat
import tempfile

import pytest

from contracts import BadInput
from envs.cache import cache_dir
from envs.libero_imports import write_libero_config


@pytest.fixture
def temporary_folder(monkeypatch, tmp_path):
    """The system's; the user's home cannot be written: no folder can be made under a file, whoever asks."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("VLA_GRPO_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_without_a_home_it_is_a_private_temporary_folder_that_is_not_someone_elses(
    monkeypatch, temporary_folder
):
    folder = cache_dir()
    assert folder == temporary_folder / f"vla-grpo-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_dir() == folder
    stranger = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    (temporary_folder / f"vla-grpo-{stranger}").mkdir()  # by us: for the stranger, someone else
    with pytest.raises(BadInput, match="VLA_GRPO_CACHE"):
        cache_dir()
    monkeypatch.setenv("VLA_GRPO_CACHE", str(temporary_folder / "cache"))
    assert cache_dir() == temporary_folder / "cache"


def test_a_cache_that_cannot_be_written_is_one_line_with_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path))
    (tmp_path / "libero").touch()  # no folder can be made in its place, whoever asks
    with pytest.raises(BadInput, match=rf"{tmp_path}.* cannot be written .*VLA_GRPO_CACHE"):
        write_libero_config()
