"""`make venv` with a stand-in for Python, which installs nothing: what is kept, made anew and refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]
# Says that it is Python 3.VERSION; answers `-m venv FOLDER` by putting itself there, and `-m pip` by noting the call.
STAND_IN = f"""#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip")
    case "$*" in
    *"index versions torch") echo "Available versions: 2.14.1, 2.13.0+cpu, 2.13.0, 2.12.1+cpu" ;;
    *) echo "$*" >>installed; for last; do :; done; ! grep "no such package" "$last" ;;
    esac ;;
"-c import torchvision" | "-m compileall") ;;
--version*) echo "Python 3.VERSION" ;;
"-c "*) exec {sys.executable} -c "import sys; sys.version_info = (3, VERSION, 0); exec(sys.argv[1])" "$2" ;;
*) exec {sys.executable} -c "import sys; sys.version_info = (3, VERSION, 0); exec(sys.stdin.read())" ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """A function that runs `make venv` with a Python 3.VERSION in a copy of the project's build files."""
    for file in (PROJECT / "Makefile", PROJECT / "requirements.lock", *PROJECT.glob("requirements*.txt")):
        shutil.copy(file, tmp_path)
    (tmp_path / "scripts").mkdir()
    shutil.copy(PROJECT / "scripts" / "make_venv.sh", tmp_path / "scripts")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in (
        "make",
        "bash",
        "sh",
        "env",
        "sed",
        "cat",
        "rm",
        "cp",
        "mkdir",
        "touch",
        "dirname",
        "sleep",
        "tail",
        "tr",
        "grep",
        "du",
        "cut",
    ):  # and no uv
        (tools / tool).symlink_to(shutil.which(tool))

    def run_make(*variables: str, version: int = 12) -> subprocess.CompletedProcess:
        python = tools / "python3"
        python.write_text(STAND_IN.replace("VERSION", str(version)))
        python.chmod(0o755)
        environ = {"PATH": str(tools), "PYTHON": str(python)}
        return subprocess.run(
            ["make", "venv", *variables], cwd=tmp_path, env=environ, capture_output=True, text=True
        )

    return run_make


def touch_later(path: Path) -> None:
    later = path.parent.stat().st_mtime + 60
    os.utime(path, (later, later))


def installations(folder: Path) -> list[str]:
    """The calls of pip that installed something."""
    return (folder / "installed").read_text().splitlines()


def test_an_environment_is_made_anew_for_other_packages_and_kept_for_the_same(make, tmp_path):
    assert make().returncode == 0
    assert len(installations(tmp_path)) == 3
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# a remark\n" + requirements.read_text())
    touch_later(requirements)  # as after a checkout, or COPY in a Dockerfile
    assert make().returncode == 0
    assert len(installations(tmp_path)) == 3
    requirements.write_text(requirements.read_text() + "another-package\n")
    touch_later(requirements)
    assert make().returncode == 0
    assert len(installations(tmp_path)) == 6


@pytest.mark.parametrize("version", [9, 14])
def test_a_python_without_wheels_is_refused_before_anything_is_removed(make, tmp_path, version):
    marker = tmp_path / ".venv" / "marker"
    marker.parent.mkdir()
    marker.touch()
    refused = make(version=version)
    assert refused.returncode != 0
    assert f"Python 3.{version} was found" in refused.stderr
    assert marker.exists()
    assert not (tmp_path / "installed").exists()


def test_cuda_is_left_out_until_another_torch_is_named(make, tmp_path):
    assert make("TORCH=cpu").returncode == 0
    torch, *others = installations(tmp_path)
    assert "torch==2.13.0+cpu torchvision" in torch  # the newest CPU build
    assert len(others) == 3
    assert make().returncode == 0
    assert len(installations(tmp_path)) == 4  # the environment is kept
    assert make("TORCH=default").returncode == 0
    assert "+cpu" not in "".join(installations(tmp_path)[4:])


def test_meshes_are_left_out_until_they_are_named(make, tmp_path):
    assert make("ASSETS=none").returncode == 0
    assert len(installations(tmp_path)) == 2
    assert make().returncode == 0
    assert len(installations(tmp_path)) == 2  # the environment is kept
    assert make("ASSETS=official").returncode == 0
    assert "requirements-assets.txt" in installations(tmp_path)[-1]


def test_locked_versions_hold_torch_too_unless_it_is_a_cpu_build(make, tmp_path):
    assert make("LOCKED=1").returncode == 0
    constraints = tmp_path / ".venv" / "constraints.txt"
    assert constraints.read_text() == (PROJECT / "requirements.lock").read_text()
    assert f"-c {constraints.relative_to(tmp_path)}" in installations(tmp_path)[0]
    assert make("LOCKED=1", "TORCH=cpu").returncode == 0
    names = {line.split("==")[0] for line in constraints.read_text().splitlines()}
    assert names.isdisjoint({"torch", "torchvision"})
    assert "numpy" in names


def test_other_locked_versions_make_the_environment_anew(make, tmp_path):
    assert make("LOCKED=1").returncode == 0
    assert "has the packages" in make().stdout
    with (tmp_path / "requirements.lock").open("a") as lock:
        lock.write("another==1.0\n")
    assert "has the packages" not in make().stdout
    assert (tmp_path / ".venv" / "constraints.txt").read_text().endswith("another==1.0\n")


def test_every_package_that_users_need_is_locked_at_a_version_that_fits():
    pairs = (line.split("==") for line in read_requirements("requirements.lock"))
    locked = {canonicalize_name(name): version for name, version in pairs}
    for name in ("requirements.txt", "requirements-demos.txt"):
        for requirement in map(Requirement, read_requirements(name)):
            assert locked[canonicalize_name(requirement.name)] in requirement.specifier


def read_requirements(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (PROJECT / name).read_text().splitlines())
    return [line for line in lines if line]


def test_a_step_that_fails_is_named_with_what_its_installer_said(make, tmp_path):
    (tmp_path / "requirements-simulator.txt").write_text("# no such package\n")
    failed = make()
    assert failed.returncode != 0
    assert "no such package" in failed.stderr
    assert "the simulator" in failed.stderr
    assert not (tmp_path / ".venv" / "complete").exists()


def test_what_torch_may_be_is_said(make, tmp_path):
    refused = make("TORCH=gpu")
    assert refused.returncode != 0
    assert "TORCH=gpu" in refused.stderr
    assert not (tmp_path / ".venv").exists()


def test_system_libraries_are_found_at_the_start_of_a_list_longer_than_a_pipe_holds(tmp_path):
    libraries = ["libEGL.so.1", "libOpenGL.so.0", *(f"libother{i}.so" for i in range(10_000))]
    (tmp_path / "libraries").write_text("\n".join(libraries))
    for tool, answer in (("ldconfig", f"cat {tmp_path / 'libraries'}"), ("id", "echo 1000")):  # not root
        (tmp_path / tool).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / tool).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = PROJECT / "scripts" / "system_packages.sh"
    assert subprocess.run([script], env=environ, check=False).returncode == 0
