import os
import stat

import pytest

from envs import cache
from envs.cache import cache_dir


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("VLA_GRPO_CACHE", raising=False)
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


def test_variable_wins_over_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "vla-grpo"
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    assert (tmp_path / "own").is_dir()


def test_unusable_home_leads_to_a_private_temporary_folder(monkeypatch, tmp_path):
    (tmp_path / "file").touch()  # a folder cannot be made under a file, whoever asks
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = cache_dir()
    assert folder == tmp_path / "tmp" / f"vla-grpo-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_dir() == folder


def test_a_temporary_folder_of_someone_else_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()
    stranger = os.getuid() + 1
    monkeypatch.setattr(cache.os, "getuid", lambda: stranger)
    taken = tmp_path / "tmp" / f"vla-grpo-{stranger}"
    taken.mkdir()  # by us: for the stranger, someone else
    folder = cache_dir()
    assert folder.parent == tmp_path / "tmp"
    assert folder != taken
