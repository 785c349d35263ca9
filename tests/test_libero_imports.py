"""Versions of the simulator, and what it does to a machine that has never seen it."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contracts import BadInput
from envs.cache import cache_dir
from envs.libero_imports import check_versions

PROJECT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("package", "other_version"), [("mujoco", "3.3.3"), ("robosuite", "1.5.1")])
def test_a_package_that_changes_libero_is_refused(monkeypatch, package, other_version):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: other_version if name == package else real(name)
    )
    with pytest.raises(BadInput, match=package):
        check_versions()


EPISODE = """
import os, sys

opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)

from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
import numpy as np

for task_id in (0, 1):
    env = LiberoEnv(EnvSpec("libero_spatial", (task_id,), num_images=1), task_id)
    assert env.reset(Start(0)).error is None
    assert env.step_chunk(np.zeros((8, 7))).error is None
unwanted = {"torch", "robomimic", "libero.lifelong", "tensorflow"} & set(sys.modules)
assert not unwanted, unwanted
assert "/tmp/robosuite.log" not in opened
assert os.path.isdir(os.path.dirname(os.environ["MESA_SHADER_CACHE_DIR"]))  # Mesa ignores HOME
print("episodes ran")
"""  # the envs are not closed: leaving them to the interpreter's exit must be quiet, too
# Beginnings of the variables that a machine may have set.
SETTINGS = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "LIBERO_", "NUMBA_", "MPL", "MESA_", "__GL", "XDG_", "VLA_GRPO")


def test_nothing_is_asked_printed_or_written_outside_the_cache(tmp_path):
    folders = {name: tmp_path / name for name in ("home", "tmp", "cwd")}
    for folder in folders.values():
        folder.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    environ |= {"HOME": str(folders["home"]), "TMPDIR": str(folders["tmp"]), "PYTHONPATH": str(PROJECT)}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1", "VLA_GRPO_CACHE": str(cache_dir())}
    ended = subprocess.run(
        [sys.executable, "-c", EPISODE],
        env=environ,
        cwd=folders["cwd"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.close(0),  # not an empty stdin: none at all
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "episodes ran\n", "")
    assert [list(folder.iterdir()) for folder in folders.values()] == [[], [], []]
