"""Which GL backend and which device draw, for every choice of the user and every rank."""

import os

import pytest

from contracts import BadInput
from envs import gl_backend
from envs.gl_backend import choose_backend, choose_egl_device, render_device
from envs.libero_imports import prepare_imports


def test_backend_is_the_users_unless_it_needs_a_display_or_lacks_its_library(monkeypatch):
    monkeypatch.setitem(gl_backend.BACKENDS, "osmesa", ((), ""))  # as if its libraries were there
    for variable, backend in (("", "egl"), ("osmesa", "osmesa"), ("EGL", "egl")):
        monkeypatch.setenv("MUJOCO_GL", variable)
        assert choose_backend() == backend
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    with pytest.raises(BadInput, match="MUJOCO_GL=glfw"):
        choose_backend()
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setitem(gl_backend.BACKENDS, "egl", (("libNoSuchThing.so.1",), "libegl1"))
    with pytest.raises(BadInput, match=r"libNoSuchThing\.so\.1 is missing.*libegl1"):
        choose_backend()


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
        monkeypatch.setattr(gl_backend, "_cuda_index", lambda device: cuda_indices[device])

    return with_devices


@pytest.mark.parametrize("visible", [None, "", "0,1", "GPU-6f4a"])
def test_the_learners_gpu_selection_survives(machine, monkeypatch, visible):
    machine(1, 2, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with render_device() as device:
        assert device == 2
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MUJOCO_EGL_DEVICE_ID"]) == ("2", "2")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert "MUJOCO_EGL_DEVICE_ID" not in os.environ


@pytest.mark.parametrize(
    ("cuda_indices", "rank", "index"),
    [
        ((0, 1), 0, 0),
        ((None, 0), 0, 1),
        ((None,), 0, 0),  # Mesa alone
        ((1, 0, 2), 0, 1),
        ((1, 0, 2), 2, 2),
        ((1, 0, 2), 3, 0),  # one rank more than there are GPUs
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
    for device in ("3", "GPU-6f4a"):
        monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", device)
        with pytest.raises(BadInput, match=f"MUJOCO_EGL_DEVICE_ID={device}"):
            choose_egl_device()


def test_no_device_or_a_driver_that_does_not_start_is_advice(machine):
    for cuda_indices in ((0,), ()):
        machine(*cuda_indices, works=False)
        with pytest.raises(BadInput, match=r"cannot be initialised.*apt-get install"):
            choose_egl_device()
