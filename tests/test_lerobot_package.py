"""The wheel of lerobot_policy_vla_grpo, built without network: it has all that its modules import."""

import ast
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
IMPORT = "import sys; sys.path.insert(0, sys.argv[1]); import vla.policy, vla.merge"

pytest.importorskip("setuptools", "77")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """What pip would put into site-packages."""
    source = tmp_path_factory.mktemp("source")
    for name in ("vla", "lerobot_policy_vla_grpo"):
        shutil.copytree(ROOT / name, source / name)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, source)
    folder = tmp_path_factory.mktemp("wheel")
    plugin = source / "lerobot_policy_vla_grpo"
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=plugin, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    ZipFile(wheel).extractall(folder / "site-packages")
    return folder / "site-packages"


def test_the_policy_can_be_imported_from_the_wheel_alone(installed):
    subprocess.run([sys.executable, "-I", "-c", IMPORT, installed], check=True, capture_output=True)


def test_every_other_package_that_is_imported_is_a_dependency(installed):
    imported = set()
    for path in installed.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
    shipped = {path.stem for path in installed.iterdir()}
    (metadata,) = installed.glob("*.dist-info/METADATA")
    dependencies = set(re.findall(r"^Requires-Dist: ([\w-]+)", metadata.read_text(), re.MULTILINE))
    distributions = packages_distributions()
    for module in imported - shipped - sys.stdlib_module_names:
        packages = [name.lower().replace("_", "-") for name in distributions.get(module, [])]
        assert dependencies & {module, *packages}  # `module` for lerobot, which may not be installed here
