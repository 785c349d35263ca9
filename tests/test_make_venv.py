"""`make venv` with a stand-in for Python, which installs nothing: what is kept, made anew and refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
# Says that it is Python 3.VERSION; answers `-m venv FOLDER` by putting itself there, and `-m pip` by noting the call.
STAND_IN = f"""#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip") echo "$*" >>installed ;;
--version*) echo "Python 3.VERSION" ;;
"-c "*) exec {sys.executable} -c "import sys; sys.version_info = (3, VERSION, 0); exec(sys.argv[1])" "$2" ;;
*) exec {sys.executable} -c "import sys; sys.version_info = (3, VERSION, 0); exec(sys.stdin.read())" ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """A function that runs `make venv` with a Python 3.VERSION in a copy of the project's build files."""
    for file in (PROJECT / "Makefile", *PROJECT.glob("requirements*.txt")):
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
    ):  # and no uv
        (tools / tool).symlink_to(shutil.which(tool))

    def run_make(version: int = 12) -> subprocess.CompletedProcess:
        python = tools / "python3"
        python.write_text(STAND_IN.replace("VERSION", str(version)))
        python.chmod(0o755)
        environ = {"PATH": str(tools), "PYTHON": str(python)}
        return subprocess.run(["make", "venv"], cwd=tmp_path, env=environ, capture_output=True, text=True)

    return run_make


def touch_later(path: Path) -> None:
    later = path.parent.stat().st_mtime + 60
    os.utime(path, (later, later))


def installations(folder: Path) -> int:
    return len((folder / "installed").read_text().splitlines())


def test_an_environment_is_made_anew_for_other_packages_and_kept_for_the_same(make, tmp_path):
    assert make().returncode == 0
    assert installations(tmp_path) == 3
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# a remark\n" + requirements.read_text())
    touch_later(requirements)  # as after a checkout, or COPY in a Dockerfile
    assert make().returncode == 0
    assert installations(tmp_path) == 3
    requirements.write_text(requirements.read_text() + "another-package\n")
    touch_later(requirements)
    assert make().returncode == 0
    assert installations(tmp_path) == 6


@pytest.mark.parametrize("version", [9, 14])
def test_a_python_without_wheels_is_refused_before_anything_is_removed(make, tmp_path, version):
    marker = tmp_path / ".venv" / "marker"
    marker.parent.mkdir()
    marker.touch()
    refused = make(version)
    assert refused.returncode != 0
    assert f"Python 3.{version} was found" in refused.stderr
    assert marker.exists()
    assert not (tmp_path / "installed").exists()
