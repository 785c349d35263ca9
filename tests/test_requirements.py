"""The locked versions are those of packages that the requirements ask for."""

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]


def read_requirements(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (PROJECT / name).read_text().splitlines())
    return [line for line in lines if line]


def test_every_package_that_users_need_is_locked_at_a_version_that_fits():
    pairs = (line.split("==") for line in read_requirements("requirements.lock"))
    locked = {canonicalize_name(name): version for name, version in pairs}
    for name in ("requirements.txt", "requirements-demos.txt"):
        for requirement in map(Requirement, read_requirements(name)):
            assert locked[canonicalize_name(requirement.name)] in requirement.specifier
