"""`make venv`: choices that it refuses, an environment that it keeps, and versions that fit the requirements."""

import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the project's build files."""
    for file in PROJECT.glob("requirements*"):
        shutil.copy(file, tmp_path)
    shutil.copytree(PROJECT / "scripts", tmp_path / "scripts")
    return tmp_path


def make_venv(folder: Path, **variables: str) -> subprocess.CompletedProcess:
    environ = {"PATH": "/usr/bin:/bin", "PYTHON": "no-such-python", **variables}
    command = [folder / "scripts" / "make_venv.sh"]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


def test_without_a_python_that_fits_nothing_is_removed(folder):
    (folder / ".venv").mkdir()
    refused = make_venv(folder)
    assert refused.returncode == 2
    assert "Python 3.10 to 3.13 is needed" in refused.stderr
    assert (folder / ".venv").exists()


def test_every_package_that_users_need_is_locked_at_a_version_that_fits():
    pairs = (line.split("==") for line in read_requirements("requirements.lock"))
    locked = {canonicalize_name(name): version for name, version in pairs}
    for name in ("requirements.txt", "requirements-demos.txt"):
        for requirement in map(Requirement, read_requirements(name)):
            assert locked[canonicalize_name(requirement.name)] in requirement.specifier


def read_requirements(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (PROJECT / name).read_text().splitlines())
    return [line for line in lines if line]
