"""What the simulator does to a machine that has never seen it: in processes of their own, LIBERO's first import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.cache import cache_dir

PROJECT = Path(__file__).resolve().parent.parent

EPISODE = """
import os, sys

opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)

from envs.libero import EnvSpec, LiberoEnv
import numpy as np

env = LiberoEnv(EnvSpec("libero_spatial", (0,), num_images=1), 0)
result = env.reset(0)
assert result.error is None, result.error
result = env.step_chunk(np.zeros((8, 7)))
assert result.error is None, result.error
unwanted = {"torch", "robomimic", "libero.lifelong", "tensorflow"} & set(sys.modules)
assert not unwanted, unwanted
assert "/tmp/robosuite.log" not in opened
assert os.path.isdir(os.path.dirname(os.environ["MESA_SHADER_CACHE_DIR"]))  # Mesa ignores HOME
print("episode ran")
"""  # the env is not closed: leaving it to the interpreter's exit must be quiet, too

TORCH_FIRST = """
import torch
from envs.libero import EnvSpec, LiberoEnv

env = LiberoEnv(EnvSpec("libero_spatial", (0,), num_images=1), 0)
assert env.reset(0).error is None
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weight])  # imports triton
weight.sum().backward()
optimizer.step()
print("episode ran")
"""


@pytest.fixture
def folders(tmp_path):
    folders = {name: tmp_path / name for name in ("home", "tmp", "cwd")}
    for folder in folders.values():
        folder.mkdir()
    return folders


def run(program, folders, **variables):
    """Run a program without stdin; returns (exit code, output, errors)."""
    foreign = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "LIBERO_", "NUMBA_", "MPL", "MESA_", "__GL", "XDG_", "VLA_GRPO")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environ |= {"HOME": str(folders["home"]), "TMPDIR": str(folders["tmp"]), "PYTHONPATH": str(PROJECT)}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1"} | variables
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environ,
        cwd=folders["cwd"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.close(0),  # not an empty stdin: none at all
    )
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


def test_nothing_is_asked_printed_or_written_outside_the_cache(folders):
    assert run(EPISODE, folders, VLA_GRPO_CACHE=str(cache_dir())) == (0, "episode ran\n", "")
    assert [list(folder.iterdir()) for folder in folders.values()] == [[], [], []]


def test_a_home_that_cannot_be_written_will_do(folders):
    temporary = folders["tmp"]
    assert run(EPISODE, folders | {"home": "/proc"}) == (0, "episode ran\n", "")
    assert [folder.name for folder in temporary.iterdir()] == [f"vla-grpo-{os.getuid()}"]


def test_torch_and_mesa_live_in_one_process(folders):
    """Mesa's LLVM loaded before triton would be a segmentation fault."""
    assert run(TORCH_FIRST, folders, VLA_GRPO_CACHE=str(cache_dir())) == (0, "episode ran\n", "")
