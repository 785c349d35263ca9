"""The cache folder where the user's home cannot be written."""

import os
import stat
import tempfile

import pytest

from contracts import BadInput
from envs.cache import cache_dir


def test_without_a_home_it_is_a_private_temporary_folder_that_is_not_someone_elses(monkeypatch, tmp_path):
    """The user's home cannot be written: no folder can be made under a file, whoever asks."""
    (tmp_path / "file").touch()
    temporary_folder = tmp_path / "tmp"
    temporary_folder.mkdir()
    monkeypatch.setenv("VLA_GRPO_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary_folder))
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
