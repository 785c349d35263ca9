"""Prepare this process to import MuJoCo, robosuite and LIBERO.

At import these libraries read environment variables, write into HOME and /tmp, and ask a question on stdin.
`prepare_imports` sets the variables and prevents the rest, so call it first.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import runpy
import sys
import types
from functools import cache
from pathlib import Path

from contracts import BadInput, replaced
from envs.cache import cache_dir, reported_cache_errors
from envs.gl_backend import prepare_gl
from envs.tasks import libero_root

INSTALL_SIMULATOR = "pip install --no-deps -r requirements-simulator.txt"


@cache
def prepare_imports() -> None:
    """Make this process ready to import the simulator. Raises BadInput for problems that the user can repair."""
    check_versions()
    prepare_gl()
    os.environ["LIBERO_CONFIG_PATH"] = str(write_libero_config())
    if "torch" in sys.modules:
        # Mesa's renderer brings its own LLVM. A process that loads Mesa first and triton afterwards dies of a
        # segmentation fault, and the first torch.optim.AdamW imports triton. So import triton now: that order works.
        import torch._dynamo  # noqa: F401
    _quiet_robosuite()


def check_versions() -> None:
    """Raises BadInput for versions of the simulator's packages with which LIBERO's tasks look or behave differently."""
    versions = simulator_versions()
    mujoco = versions["mujoco"]
    robosuite = versions["robosuite"]
    if not robosuite.startswith("1.4."):
        raise BadInput(
            f"robosuite {robosuite} is not the 1.4 that LIBERO's tasks need; run: {INSTALL_SIMULATOR}"
        )
    release = tuple(int(part) for part in re.findall(r"\d+", mujoco)[:3])
    if not (3, 2, 7) <= release <= (3, 3, 2):
        raise BadInput(
            f"mujoco {mujoco} draws or simulates LIBERO differently from 3.2.7 .. 3.3.2 (from 3.4 on other contacts: "
            "98 % -> 12 % success); run: pip install mujoco==3.3.0"
        )


def simulator_versions() -> dict[str, str]:
    """The versions of mujoco, robosuite and LIBERO, read without importing them. Raises BadInput if one is missing."""
    try:
        return {name: importlib.metadata.version(name) for name in ("mujoco", "robosuite", "hf-libero")}
    except importlib.metadata.PackageNotFoundError as missing:
        repair = f"run: pip install -r requirements.txt && {INSTALL_SIMULATOR}"
        raise BadInput(f"{missing.name} is not installed; {repair}") from None


def write_libero_config() -> Path:
    """Write the config.yaml of LIBERO; returns its folder. Without it `import libero.libero` asks on stdin.

    Raises BadInput if the cache folder cannot be written.
    """
    root = libero_root()
    # Every installation of LIBERO has a folder of its own.
    folder = cache_dir() / "libero" / hashlib.sha256(str(root).encode()).hexdigest()[:16]
    path = folder / "config.yaml"
    config = {
        "benchmark_root": str(root),
        "bddl_files": str(root / "bddl_files"),
        "init_states": str(root / "init_files"),
        "assets": str(root / "assets"),
        "datasets": str(root / "../datasets"),
    }
    with reported_cache_errors(cache_dir()):
        # Every worker comes here, and after the first one there is nothing to write.
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with replaced(path) as draft:
                draft.write_text(json.dumps(config))  # every JSON file is a YAML file, too
    return folder


def _quiet_robosuite() -> None:
    """Keep robosuite from writing /tmp/robosuite.log and from printing a note about "private macros".

    If the log file belonged to another user, robosuite would raise PermissionError.
    """
    if "robosuite" in sys.modules:
        return
    # robosuite opens the log file while it is imported, so its settings have to change before. Load the module of its
    # settings alone, change it, and put it where robosuite's import finds it.
    (package,) = importlib.util.find_spec("robosuite").submodule_search_locations  # type: ignore[union-attr, misc]
    macros = types.ModuleType("robosuite.macros")
    macros.__dict__.update(runpy.run_path(f"{package}/macros.py", run_name="robosuite.macros"))
    macros.__dict__["FILE_LOGGING_LEVEL"] = None
    sys.modules["robosuite.macros"] = macros
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
