"""Which device draws, for every choice of the user and every rank."""

import os

import pytest

from envs import gl_backend
from envs.gl_backend import choose_egl_device, render_device
from envs.libero_imports import prepare_imports


@pytest.fixture
def machine(monkeypatch):
    """Sets up a machine with EGL devices of these CUDA indices, None for what CUDA cannot see.

    closed: the devices that cannot be opened.
    """
    prepare_imports()
    from mujoco.egl import egl_ext

    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)

    def with_devices(*cuda_indices, closed=()):
        monkeypatch.setattr(egl_ext, "eglQueryDevicesEXT", lambda: list(range(len(cuda_indices))))
        monkeypatch.setattr(gl_backend, "_cuda_index", lambda device: cuda_indices[device])
        monkeypatch.setattr(gl_backend, "_can_be_opened", lambda device: device not in closed)

    return with_devices


@pytest.mark.parametrize("visible", [None, "0,1"])
def test_the_learners_gpu_selection_survives(machine, monkeypatch, visible):
    machine(1, 2, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with render_device() as device:
        assert device == os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["MUJOCO_EGL_DEVICE_ID"] == "2"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert "MUJOCO_EGL_DEVICE_ID" not in os.environ


@pytest.mark.parametrize(
    ("cuda_indices", "rank", "index"),
    [
        ((0, 1), 0, "0"),
        ((None, 0), 0, "1"),
        ((None,), 0, "0"),  # Mesa alone
        ((1, 0, 2), 2, "2"),
        ((1, 0, 2), 3, "0"),  # one rank more than there are GPUs
    ],
)
def test_every_rank_renders_on_its_own_gpu_unless_the_user_chooses(
    machine, monkeypatch, cuda_indices, rank, index
):
    machine(*cuda_indices)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert choose_egl_device() == index
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "7")
    assert choose_egl_device() == "7"


@pytest.mark.parametrize(("closed", "index"), [((0,), "1"), ((0, 1, 2), "0")])
def test_a_device_that_cannot_be_opened_is_passed_over(machine, closed, index):
    machine(None, None, None, closed=closed)
    assert choose_egl_device() == index


def test_what_egl_lists_but_does_not_know_cannot_be_opened(machine):
    can_be_opened = gl_backend._can_be_opened
    machine(None)
    assert not can_be_opened(None)
