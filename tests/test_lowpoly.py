"""The low-poly pack: LIBERO's masses and contacts, all of its objects, and the archive that envs/assets.py unpacks.

That its trajectories are those of LIBERO's own assets is in test_golden_physics.py.
"""

import errno
import hashlib
import io
import re
import runpy
import zipfile
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest
from PIL import Image

from contracts import BadInput
from envs.assets import LOWPOLY_ARCHIVE, LOWPOLY_NAME, find_pack
from envs.tasks import libero_root
from workshop.lowpoly.__main__ import draw_pack, look_of, write_archive
from workshop.lowpoly.facts import load_facts
from workshop.lowpoly.mjcf import asset_mjcf
from workshop.lowpoly.textures import TEXTURES

NUMBER = rb"-?\b\d+(?:\.\d+)?(?:e[-+]?\d+)?\b"
FILES = {file.name: file for file in load_facts()}
OBJECTS = [name for name, file in FILES.items() if not file.is_arena]


@pytest.mark.parametrize("name", OBJECTS)
def test_what_is_drawn_changes_neither_mass_nor_contacts(name):
    look = look_of(FILES[name])
    drawn = _compile(asset_mjcf(FILES[name], look))
    bare = _compile(asset_mjcf(FILES[name], replace(look, shapes={})))
    np.testing.assert_array_equal(drawn.body_mass, bare.body_mass)
    np.testing.assert_array_equal(drawn.body_inertia, bare.body_inertia)
    np.testing.assert_array_equal(drawn.body_ipos, bare.body_ipos)
    touches = (drawn.geom_contype != 0) | (drawn.geom_conaffinity != 0)
    for field in ("geom_type", "geom_size", "geom_pos", "geom_quat", "geom_friction", "geom_bodyid"):
        np.testing.assert_array_equal(getattr(drawn, field)[touches], getattr(bare, field)[: touches.sum()])
    assert drawn.ngeom > bare.ngeom == touches.sum()


def _compile(mjcf: str) -> mujoco.MjModel:
    """With robosuite's compiler settings: mass counts in group 0 alone."""
    settings = '<compiler angle="radian" inertiafromgeom="auto" inertiagrouprange="0 0"/>'
    return mujoco.MjModel.from_xml_string(mjcf.replace("<asset>", settings + "<asset>", 1))


def test_every_floor_and_wall_that_liberos_arenas_can_ask_for_exists():
    styles = runpy.run_path(str(libero_root() / "envs" / "arenas" / "style.py"))
    assert {*styles["FLOOR_STYLE"].values(), *styles["WALL_STYLE"].values()} <= set(TEXTURES)


def _archived() -> dict[str, bytes]:
    with zipfile.ZipFile(LOWPOLY_ARCHIVE) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _words_and_numbers(path: str, content: bytes) -> tuple[bytes, np.ndarray]:
    """The text between a file's numbers, and its numbers; of a picture its pixels."""
    if path.endswith(".png"):
        return b"", np.asarray(Image.open(io.BytesIO(content)), float)
    return re.sub(NUMBER, b"", content), np.array(re.findall(NUMBER, content), float)


def test_the_archive_holds_what_is_drawn():
    drawn = draw_pack()
    archived = _archived()
    assert drawn.keys() == archived.keys()
    for path in drawn:
        words, numbers = _words_and_numbers(path, drawn[path])
        archived_words, archived_numbers = _words_and_numbers(path, archived[path])
        assert words == archived_words, path
        # Another machine may round a pixel, or a mesh's last digit, the other way.
        tolerance = 1.0 if path.endswith(".png") else 2e-5
        np.testing.assert_allclose(numbers, archived_numbers, rtol=0, atol=tolerance, err_msg=path)


def test_other_pictures_have_another_name():
    """If this fails: give LOWPOLY_NAME another number, rename the archive, and put both here."""
    digest = hashlib.sha256(b"".join(_archived().values())).hexdigest()
    assert (LOWPOLY_NAME, digest) == (
        "lowpoly-e981a0a7b12e",
        "3f1bc5cdee8fa82dd0d19f0d545a62154809359a0bfbdc4805c6665b861f58cd",
    )


def test_the_archive_is_the_same_whenever_it_is_written(tmp_path):
    for name in ("first", "second"):
        write_archive(tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_the_pack_is_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path))
    folder = find_pack("lowpoly").folder
    assert list(tmp_path.iterdir()) == [folder]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(folder)): path.read_bytes() for path in files} == _archived()
    monkeypatch.setattr("envs.assets.LOWPOLY_ARCHIVE", tmp_path / "none")
    assert find_pack("lowpoly").folder == folder


def test_two_processes_may_unpack_it_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path))
    unpack = zipfile.ZipFile.extractall

    def overtaken(archive: zipfile.ZipFile, folder: Path) -> None:
        monkeypatch.setattr(zipfile.ZipFile, "extractall", unpack)
        find_pack("lowpoly")
        unpack(archive, folder)

    monkeypatch.setattr(zipfile.ZipFile, "extractall", overtaken)
    folder = find_pack("lowpoly").folder
    assert list(tmp_path.iterdir()) == [folder]


def test_a_pack_that_could_not_be_finished_is_not_there(tmp_path, monkeypatch):
    def fail_halfway(archive: zipfile.ZipFile, folder: Path) -> None:
        archive.extract(archive.namelist()[0], folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path))
    monkeypatch.setattr(zipfile.ZipFile, "extractall", fail_halfway)
    with pytest.raises(BadInput, match=r"No space left on device.*VLA_GRPO_CACHE"):
        find_pack("lowpoly")
    assert list(tmp_path.iterdir()) == []
