import os
from pathlib import Path

import pytest
import yaml

from envs import setup
from envs.setup import (
    check_system,
    check_versions,
    choose_backend,
    egl_device,
    simulator_versions,
    write_libero_config,
)
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


@pytest.fixture
def installed(monkeypatch):
    """Sets the versions of packages; None: not installed by pip."""

    def versions(**numbers):
        def version(package):
            number = numbers.get(package.replace("-", "_"), real(package))
            if number is None:
                raise setup.importlib.metadata.PackageNotFoundError(package)
            return number

        monkeypatch.setattr(setup.importlib.metadata, "version", version)

    real = setup.importlib.metadata.version
    return versions


@pytest.mark.parametrize("version", ["3.4.0", "3.8.1", "3.10.2", "4.0"])
def test_mujoco_with_other_contacts_is_refused(installed, version):
    installed(mujoco=version)
    for check in (check_versions, check_system):
        with pytest.raises(BadInput, match=r"run: pip install mujoco==3\.3\.0"):
            check()


@pytest.mark.parametrize(("version", "warns"), [("3.3.0", False), ("3.2.7", False), ("3.3.3", True), ("3.1.6", True)])
def test_mujoco_that_differs_a_little_is_warned_of(installed, version, warns):
    installed(mujoco=version)
    caution = check_versions()
    assert caution is None if not warns else (version in caution and "pip install mujoco==3.3.0" in caution)


@pytest.mark.parametrize("version", ["1.3.2", "1.5.1"])
def test_robosuite_of_another_generation_is_refused(installed, version):
    installed(robosuite=version)
    with pytest.raises(BadInput, match=rf"robosuite {version} .* requirements-simulator\.txt"):
        check_versions()


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda module: None if module == "robosuite" else "there")
    with pytest.raises(BadInput, match=r"robosuite is not installed; run: pip install --no-deps -r requirements-sim"):
        check_versions()


def test_a_package_without_metadata_is_of_an_unknown_version(installed):
    installed(robosuite=None, hf_libero=None)
    assert set(simulator_versions()) == {"mujoco", "robosuite", "libero"}
    assert simulator_versions()["libero"] == "of an unknown version"
    assert check_versions() is None


def test_missing_system_library_names_the_packages(monkeypatch):
    monkeypatch.setitem(setup.BACKENDS, "egl", (("libNoSuchThing.so.1",), setup.BACKENDS["egl"][1]))
    with pytest.raises(
        BadInput, match=r"libNoSuchThing\.so\.1 is missing; run: apt-get install libegl1 libopengl0 libgl1-mesa-dri"
    ):
        check_system("egl")


def test_libero_config_names_existing_folders(tmp_path):
    folder = write_libero_config(tmp_path / "libero")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert set(config) == {"benchmark_root", "bddl_files", "init_states", "datasets", "assets"}
    assert os.path.isfile(os.path.join(config["bddl_files"], "libero_goal", "turn_on_the_stove.bddl"))
    assert os.path.isfile(os.path.join(config["init_states"], "libero_goal", "turn_on_the_stove.pruned_init"))
    assert os.listdir(folder) == ["config.yaml"]


def test_two_installations_do_not_find_each_others_libero(tmp_path, monkeypatch):
    own = write_libero_config(tmp_path)
    before = (own / "config.yaml").read_text()
    monkeypatch.setattr(setup, "libero_root", lambda: Path("/another/installation"))
    other = write_libero_config(tmp_path)
    assert other != own
    assert "/another/installation/bddl_files" in (other / "config.yaml").read_text()
    assert (own / "config.yaml").read_text() == before


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
