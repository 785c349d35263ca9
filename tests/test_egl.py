import pytest

from envs import egl
from envs.setup import prepare
from errors import BadInput


@pytest.fixture
def machine(monkeypatch):
    """Sets up a machine with EGL devices of the given CUDA numbers, none for what CUDA cannot see."""
    prepare()
    from mujoco.egl import egl_ext

    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)

    def with_devices(*cuda_numbers, works=True):
        monkeypatch.setattr(egl_ext, "eglQueryDevicesEXT", lambda: list(range(len(cuda_numbers))))
        monkeypatch.setattr(egl, "_cuda_ordinal", lambda device: cuda_numbers[device])
        monkeypatch.setattr(egl, "_initialises", lambda device: works)

    return with_devices


@pytest.mark.parametrize(
    ("cuda_numbers", "index"),
    [((0, 1), 0), ((None, 0), 1), ((1, 0), 1), ((None, None), 0), ((None,), 0)],
    # as seen with two GPUs and CUDA_VISIBLE_DEVICES unset, 1, "1,0" and ""; the last: Mesa alone
)
def test_rendering_follows_the_learner(machine, cuda_numbers, index):
    machine(*cuda_numbers)
    assert egl.choose_egl_device(None) == index


@pytest.mark.parametrize(("local_rank", "index"), [("0", 1), ("1", 0), ("2", 2), ("3", 0)])
def test_under_accelerate_launch_every_process_renders_on_its_own_gpu(machine, monkeypatch, local_rank, index):
    machine(1, 0, 2)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert egl.choose_egl_device(None) == index


def test_the_users_choice_wins(machine, monkeypatch):
    machine(0, 1, 2)
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "1")
    assert egl.choose_egl_device(None) == 1
    assert egl.choose_egl_device(2) == 2


@pytest.mark.parametrize("wanted", ["2", "-1", "GPU-6f4a"])
def test_a_device_that_does_not_exist_is_refused(machine, monkeypatch, wanted):
    machine(0, 1)
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", wanted)
    with pytest.raises(BadInput, match=rf"MUJOCO_EGL_DEVICE_ID={wanted}: EGL sees 2 device"):
        egl.choose_egl_device(None)


def test_a_driver_that_does_not_start_is_advice(machine):
    machine(0, works=False)
    with pytest.raises(BadInput, match=r"cannot be initialised.*apt-get install.*NVIDIA_DRIVER_CAPABILITIES=all"):
        egl.choose_egl_device(None)
    machine()
    with pytest.raises(BadInput, match="EGL device 0 of 0"):
        egl.choose_egl_device(None)
