import os

import pytest
import yaml

from envs import setup
from envs.setup import check_system, choose_backend, egl_device, write_libero_config
from errors import BadInput


@pytest.mark.parametrize(
    ("wanted", "environ", "backend"),
    [
        (None, {}, "egl"),
        (None, {"MUJOCO_GL": "osmesa"}, "osmesa"),
        (None, {"PYOPENGL_PLATFORM": "osmesa"}, "osmesa"),
        ("egl", {"MUJOCO_GL": "EGL", "PYOPENGL_PLATFORM": "egl"}, "egl"),
    ],
)
def test_backend_is_the_users(wanted, environ, backend):
    assert choose_backend(wanted, environ) == backend


@pytest.mark.parametrize(
    ("wanted", "environ"),
    [(None, {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "osmesa"}), ("osmesa", {"MUJOCO_GL": "egl"})],
)
def test_contradicting_render_settings_are_refused(wanted, environ):
    with pytest.raises(BadInput, match="contradict"):
        choose_backend(wanted, environ)


def test_a_backend_that_needs_a_display_is_refused():
    with pytest.raises(BadInput, match="MUJOCO_GL=glfw; use egl or osmesa"):
        choose_backend(None, {"MUJOCO_GL": "glfw"})


@pytest.mark.parametrize("version", ["3.4.0", "3.8.1", "3.10.2", "4.0"])
def test_mujoco_with_other_contacts_is_refused(monkeypatch, version):
    monkeypatch.setattr(setup.importlib.metadata, "version", lambda package: version)
    with pytest.raises(BadInput, match=r"pip install mujoco==3\.3\.0"):
        check_system("egl")


@pytest.mark.parametrize(("version", "warns"), [("3.3.0", False), ("3.2.7", False), ("3.3.3", True), ("3.1.6", True)])
def test_mujoco_that_differs_a_little_is_warned_of(monkeypatch, caplog, version, warns):
    monkeypatch.setattr(setup.importlib.metadata, "version", lambda package: version)
    check_system("egl")
    assert (version in caplog.text) == warns


def test_missing_system_library_names_the_packages(monkeypatch):
    monkeypatch.setitem(setup.BACKENDS, "egl", (("libNoSuchThing.so.1",), setup.BACKENDS["egl"][1]))
    with pytest.raises(
        BadInput, match=r"libNoSuchThing\.so\.1 is missing; run: apt-get install libegl1 libopengl0 libgl1-mesa-dri"
    ):
        check_system("egl")


def test_libero_config_names_existing_folders(tmp_path):
    config = yaml.safe_load((write_libero_config(tmp_path / "libero") / "config.yaml").read_text())
    assert set(config) == {"benchmark_root", "bddl_files", "init_states", "datasets", "assets"}
    assert os.path.isfile(os.path.join(config["bddl_files"], "libero_goal", "turn_on_the_stove.bddl"))
    assert os.path.isfile(os.path.join(config["init_states"], "libero_goal", "turn_on_the_stove.pruned_init"))
    assert os.listdir(tmp_path / "libero") == ["config.yaml"]


@pytest.mark.parametrize("visible", [None, "", "3", "0,1", "GPU-6f4a"])
def test_the_learners_gpu_selection_survives(monkeypatch, visible):
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with egl_device(2):
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MUJOCO_EGL_DEVICE_ID"]) == ("2", "2")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert "MUJOCO_EGL_DEVICE_ID" not in os.environ
