"""The low-poly pack: LIBERO's masses and contacts, all of its objects, and shapes that fit what collides.

That its trajectories are those of LIBERO's own assets is in test_golden_physics.py.
"""

import errno
import runpy
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest

import workshop.lowpoly
from contracts import BadInput
from envs.tasks import libero_root
from workshop.lowpoly import asset_mjcf, ensure_pack, look_of, write_pack
from workshop.lowpoly.facts import load_facts
from workshop.lowpoly.rooms import TEXTURES

FILES = {file.name: file for file in load_facts()}
OBJECTS = [name for name, file in FILES.items() if not file.is_arena]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return ensure_pack(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", OBJECTS)
def test_what_is_drawn_changes_neither_mass_nor_contacts(name):
    look = look_of(FILES[name])
    drawn, bare = (_compile(asset_mjcf(FILES[name], each)) for each in (look, replace(look, shapes={})))
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


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_pack_is_the_same_wherever_it_is_written(pack, tmp_path):
    write_pack(tmp_path)
    assert _contents(tmp_path) == _contents(pack)
    assert ensure_pack(pack.parent) == pack


def test_a_pack_that_could_not_be_finished_is_not_there(tmp_path, monkeypatch):
    def fail_halfway(folder: Path) -> None:
        (folder / "scenes").mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(workshop.lowpoly, "write_pack", fail_halfway)
    with pytest.raises(BadInput, match=r"No space left on device.*VLA_GRPO_CACHE"):
        ensure_pack(tmp_path)
    assert list(tmp_path.iterdir()) == []
