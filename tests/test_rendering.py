"""Versions, GL backends and devices, and what the simulator does to a machine that has never seen it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from contracts import BadInput
from envs import rendering
from envs.rendering import (
    check_versions,
    choose_backend,
    choose_egl_device,
    prepare_imports,
    render_device,
    write_libero_config,
)
from envs.tasks import cache_dir

PROJECT = Path(__file__).resolve().parent.parent


def test_backend_is_the_users_unless_it_needs_a_display_or_lacks_its_library(monkeypatch):
    monkeypatch.setitem(rendering.BACKENDS, "osmesa", ((), ""))  # as if its libraries were there
    for variable, backend in (("", "egl"), ("osmesa", "osmesa"), ("EGL", "egl")):
        monkeypatch.setenv("MUJOCO_GL", variable)
        assert choose_backend() == backend
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    with pytest.raises(BadInput, match="MUJOCO_GL=glfw; use egl or osmesa"):
        choose_backend()
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setitem(rendering.BACKENDS, "egl", (("libNoSuchThing.so.1",), "libegl1"))
    with pytest.raises(BadInput, match=r"libNoSuchThing\.so\.1 is missing; run: apt-get install libegl1"):
        choose_backend()


@pytest.fixture
def install(monkeypatch):
    """Sets the version of a package; None: not installed by pip."""
    metadata = rendering.importlib.metadata
    real = metadata.version

    def version_is(package, number):
        def version(name):
            if name == package and number is None:
                raise metadata.PackageNotFoundError(name)
            return number if name == package else real(name)

        monkeypatch.setattr(metadata, "version", version)

    return version_is


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("mujoco", "3.4.0", r"run: pip install mujoco==3\.3\.0"),
        ("mujoco", "3.10.2", r"run: pip install mujoco==3\.3\.0"),
        ("robosuite", "1.5.1", r"robosuite 1\.5\.1 .* requirements-simulator\.txt"),
        (
            "hf-libero",
            None,
            r"hf-libero is not installed; run: .*pip install --no-deps -r requirements-simulator",
        ),
    ],
)
def test_a_package_that_changes_libero_is_refused_with_the_command(install, package, version, expected):
    install(package, version)
    with pytest.raises(BadInput, match=expected):
        check_versions()


def test_mujoco_that_differs_a_little_is_warned_of(install):
    for version, warns in (("3.3.0", False), ("3.2.7", False), ("3.3.3", True), ("3.1.6", True)):
        install("mujoco", version)
        assert (check_versions() or "").endswith("pip install mujoco==3.3.0") == warns


@pytest.fixture
def machine(monkeypatch):
    """Sets up a machine with EGL devices of these CUDA indices, None for what CUDA cannot see."""
    prepare_imports()
    from mujoco.egl import egl_ext

    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    monkeypatch.setenv("MUJOCO_GL", "egl")

    def with_devices(*cuda_indices, works=True):
        monkeypatch.setattr(egl_ext, "eglQueryDevicesEXT", lambda: list(range(len(cuda_indices))))
        monkeypatch.setattr(egl_ext, "eglGetPlatformDisplayEXT", lambda *_: None)
        monkeypatch.setattr(egl_ext, "eglInitialize", lambda *_: works)
        monkeypatch.setattr(rendering, "_cuda_index", lambda device: cuda_indices[device])

    return with_devices


@pytest.mark.parametrize("visible", [None, "", "3", "0,1", "GPU-6f4a"])
def test_the_learners_gpu_selection_survives(machine, monkeypatch, visible):
    machine(1, 2, 0)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with render_device() as device:
        assert device == 2
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MUJOCO_EGL_DEVICE_ID"]) == ("2", "2")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert "MUJOCO_EGL_DEVICE_ID" not in os.environ


@pytest.mark.parametrize(
    ("cuda_indices", "rank", "index"),
    [
        # As seen with two GPUs and CUDA_VISIBLE_DEVICES unset, 1, "1,0" and "".
        ((0, 1), 0, 0),
        ((None, 0), 0, 1),
        ((1, 0), 0, 1),
        ((None, None), 0, 0),
        # Mesa alone.
        ((None,), 0, 0),
        # Three GPUs, and one rank more than there are.
        ((1, 0, 2), 0, 1),
        ((1, 0, 2), 1, 0),
        ((1, 0, 2), 2, 2),
        ((1, 0, 2), 3, 0),
    ],
)
def test_every_rank_renders_on_its_own_gpu(machine, monkeypatch, cuda_indices, rank, index):
    machine(*cuda_indices)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert choose_egl_device() == index


def test_the_users_choice_wins_if_there_is_such_a_device(machine, monkeypatch):
    machine(0, 1, 2)
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "1")
    assert choose_egl_device() == 1
    for device in ("3", "-1", "GPU-6f4a"):
        monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", device)
        with pytest.raises(BadInput, match=rf"MUJOCO_EGL_DEVICE_ID={device}: EGL sees 3 device"):
            choose_egl_device()


def test_no_device_or_a_driver_that_does_not_start_is_advice(machine):
    for cuda_indices in ((0,), ()):
        machine(*cuda_indices, works=False)
        with pytest.raises(
            BadInput, match=r"cannot be initialised.*apt-get install.*NVIDIA_DRIVER_CAPABILITIES=all"
        ):
            choose_egl_device()


# ------------------------------------------------------------- LIBERO's first import, in processes of their own

EPISODE = """
import os, sys

opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)

from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
import numpy as np

env = LiberoEnv(EnvSpec("libero_spatial", (0,), num_images=1), 0)
result = env.reset(Start(0))
assert result.error is None, result.error
result = env.step_chunk(np.zeros((8, 7)))
assert result.error is None, result.error
unwanted = {"torch", "robomimic", "libero.lifelong", "tensorflow"} & set(sys.modules)
assert not unwanted, unwanted
assert "/tmp/robosuite.log" not in opened
assert os.path.isdir(os.path.dirname(os.environ["MESA_SHADER_CACHE_DIR"]))  # Mesa ignores HOME
print("episode ran")
"""  # the env is not closed: leaving it to the interpreter's exit must be quiet, too


@pytest.fixture
def folders(tmp_path):
    folders = {name: tmp_path / name for name in ("home", "tmp", "cwd")}
    for folder in folders.values():
        folder.mkdir()
    return folders


# Beginnings of the variables that a machine may have set.
SETTINGS = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "LIBERO_", "NUMBA_", "MPL", "MESA_", "__GL", "XDG_", "VLA_GRPO")


def run(program, folders, **variables):
    """Run a program without stdin; returns (exit code, output, errors)."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    environ |= {"HOME": str(folders["home"]), "TMPDIR": str(folders["tmp"]), "PYTHONPATH": str(PROJECT)}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1"} | variables
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environ,
        cwd=folders["cwd"],
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: os.close(0),  # not an empty stdin: none at all
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_liberos_configuration_is_written_once(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path))
    path = write_libero_config() / "config.yaml"
    written = path.stat()
    assert write_libero_config() == path.parent
    assert path.stat() == written


def test_nothing_is_asked_printed_or_written_outside_the_cache(folders):
    assert run(EPISODE, folders, VLA_GRPO_CACHE=str(cache_dir())) == (0, "episode ran\n", "")
    assert [list(folder.iterdir()) for folder in folders.values()] == [[], [], []]
