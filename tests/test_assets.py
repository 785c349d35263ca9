"""Where asset packs are found, and that a pack is its content."""

import errno
import shutil
import sys
import zipfile

import pytest

from contracts import BadInput
from envs.assets import SUBFOLDERS, find_pack


@pytest.fixture
def folder(tmp_path):
    for name in SUBFOLDERS:
        (tmp_path / "assets" / name).mkdir(parents=True)
    return tmp_path / "assets"


def test_a_wrong_folder_is_refused_with_what_it_lacks(folder, tmp_path):
    assert (find_pack(str(folder)).name, find_pack(str(folder)).folder) == ("own", folder)
    (folder / "scenes").rmdir()
    with pytest.raises(BadInput, match="lacks scenes"):
        find_pack(str(folder))
    with pytest.raises(BadInput, match="does not exist"):
        find_pack(str(tmp_path / "none"))


def test_a_folder_is_known_by_its_content_wherever_it_lies(tmp_path):
    copy = shutil.copytree(find_pack("lowpoly").folder, tmp_path / "copy")
    pack = find_pack(str(copy))
    moved = find_pack(str(shutil.copytree(copy, tmp_path / "moved")))
    assert (pack.name, pack.folder, pack.looks) == ("own", copy, moved.looks)
    texture = copy / "textures" / "smooth_light_gray_plaster.png"
    texture.write_bytes(texture.read_bytes() + b"0")
    assert find_pack(str(copy)).looks != moved.looks


def test_official_is_the_variable_then_the_packages_then_hf_liberos_cache(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("LIBERO_ASSETS", raising=False)
    monkeypatch.setattr("envs.assets.PACKAGES", "no_such_package")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(BadInput, match="lowpoly"):
        find_pack("official")
    cached = tmp_path / "home" / ".cache" / "libero" / "assets"
    shutil.copytree(folder, cached)
    assert find_pack("official").folder == cached
    monkeypatch.setattr("envs.assets.PACKAGES", "namespace_of_packages")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    packaged = shutil.copytree(folder, tmp_path / "site" / "namespace_of_packages" / "assets")
    assert find_pack("official").folder == packaged
    monkeypatch.setenv("LIBERO_ASSETS", str(folder))
    assert find_pack("official").folder == folder


def test_the_low_poly_pack_is_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path))
    folder = find_pack("lowpoly").folder
    assert list(tmp_path.iterdir()) == [folder]
    monkeypatch.setattr("envs.assets.LOWPOLY_ARCHIVE", tmp_path / "none")
    assert find_pack("lowpoly").folder == folder


def test_a_pack_that_could_not_be_finished_is_not_there(tmp_path, monkeypatch):
    def fail_halfway(archive, folder):
        archive.extract(archive.namelist()[0], folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path))
    monkeypatch.setattr(zipfile.ZipFile, "extractall", fail_halfway)
    with pytest.raises(BadInput, match=r"No space left on device.*VLA_GRPO_CACHE"):
        find_pack("lowpoly")
    assert list(tmp_path.iterdir()) == []
