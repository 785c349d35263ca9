"""The low-poly pack: LIBERO's masses and contacts, all of its objects, and shapes that fit what collides.

That its trajectories are those of LIBERO's own assets is in test_golden_physics.py.
After a change of what is drawn: give `PACK_NAME` another number and run `python -m tests.test_lowpoly`.
"""

import errno
import hashlib
import io
import json
import re
import runpy
import tempfile
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest
from PIL import Image

from contracts import BadInput
from envs.lowpoly import pack as pack_module
from envs.lowpoly.facts import load_facts
from envs.lowpoly.mjcf import asset_mjcf
from envs.lowpoly.pack import PACK_NAME, ensure_pack, look_of, write_pack
from envs.lowpoly.textures import TEXTURES
from envs.tasks import libero_root

GOLDEN = Path(__file__).parent / "golden" / "lowpoly.json"
NUMBER = rb"-?\b\d+(?:\.\d+)?(?:e[-+]?\d+)?\b"
FILES = {file.name: file for file in load_facts()}
OBJECTS = [name for name, file in FILES.items() if not file.is_arena]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return ensure_pack(tmp_path_factory.mktemp("cache"))


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


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_pack_is_the_same_wherever_it_is_written(pack, tmp_path):
    write_pack(tmp_path)
    assert _contents(tmp_path) == _contents(pack)
    assert ensure_pack(pack.parent) == pack


def _summary(path: str, content: bytes) -> list[str | float]:
    """A hash of a file's words, and one number that depends on all its numbers (of a picture, on all its pixels)."""
    if path.endswith(".png"):
        words = b""
        numbers = np.asarray(Image.open(io.BytesIO(content)), float).ravel()
    else:
        words = re.sub(NUMBER, b"", content)
        numbers = np.array(re.findall(NUMBER, content), float)
    return [hashlib.sha256(words).hexdigest()[:12], float(numbers @ np.cos(np.arange(len(numbers))))]


def _summaries(folder: Path) -> dict[str, list[str | float]]:
    return {path: _summary(path, content) for path, content in sorted(_contents(folder).items())}


def test_the_pack_is_drawn_as_its_name_promises(pack):
    golden = json.loads(GOLDEN.read_text())
    drawn = _summaries(pack)
    assert golden["name"] == PACK_NAME
    assert drawn.keys() == golden["files"].keys()
    for path, (words, numbers) in golden["files"].items():
        assert drawn[path][0] == words, path
        # Another machine may round a few pixels, or a mesh's last digit, the other way.
        tolerance = 1.0 if path.endswith(".png") else 1e-3
        assert drawn[path][1] == pytest.approx(numbers, abs=tolerance), path


def test_a_pack_that_could_not_be_finished_is_not_there(tmp_path, monkeypatch):
    def fail_halfway(folder: Path) -> None:
        (folder / "scenes").mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack_module, "write_pack", fail_halfway)
    with pytest.raises(BadInput, match=r"No space left on device.*VLA_GRPO_CACHE"):
        ensure_pack(tmp_path)
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_pack(Path(folder))
        GOLDEN.write_text(json.dumps({"name": PACK_NAME, "files": _summaries(Path(folder))}, indent=1) + "\n")
