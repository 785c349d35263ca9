"""Everything that must be true before MuJoCo, robosuite and LIBERO are imported for the first time.

They read environment variables at import, write into HOME and /tmp, ask a question on stdin and die of each other's
libraries. `prepare` settles all of it once; it is called by whoever builds an env, in the process that builds it.
"""

import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import yaml

from envs.cache import cache_dir
from envs.tasks import libero_root
from errors import BadInput

UNKNOWN = "of an unknown version"
BACKENDS = {  # render backend -> shared libraries it needs, Debian packages that bring them
    "egl": (("libEGL.so.1", "libOpenGL.so.0"), "libegl1 libopengl0 libgl1-mesa-dri"),
    "osmesa": (("libOSMesa.so.8", "libGL.so.1"), "libosmesa6 libgl1"),
}
# Where libraries keep what they would otherwise write into the user's home; the drivers' shader caches outlive a run.
HOME_WRITERS = {
    "MPLCONFIGDIR": "matplotlib",  # LIBERO imports it
    "MESA_SHADER_CACHE_DIR": "mesa",
    "__GL_SHADER_DISK_CACHE_PATH": "nvidia",
}


def check_system(render_backend: str | None = None) -> str:
    """The render backend in force ("egl" or "osmesa"), once versions and system libraries are found to be right.

    Imports and changes nothing. Raises BadInput for everything that the user can repair.
    """
    backend = choose_backend(render_backend, os.environ)
    check_versions()
    _check_libraries(backend)
    return backend


@cache
def prepare(render_backend: str | None = None) -> str:
    """Make this process ready to import the simulator; returns the render backend in force."""
    check_versions()
    backend = prepare_rendering(render_backend)
    os.environ["LIBERO_CONFIG_PATH"] = str(write_libero_config(cache_dir() / "libero"))
    os.environ["NUMBA_CACHE_DIR"] = str(cache_dir() / "numba")  # robosuite would write into site-packages
    _load_triton_before_mesa()
    _quiet_robosuite()
    return backend


def prepare_rendering(render_backend: str | None = None) -> str:
    """The part of `prepare` that MuJoCo alone needs, whatever versions there are."""
    backend = choose_backend(render_backend, os.environ)
    _check_libraries(backend)
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = backend
    for variable, name in HOME_WRITERS.items():
        os.environ.setdefault(variable, str(cache_dir() / name))
    return backend


def choose_backend(wanted: str | None, environ: Mapping[str, str]) -> str:
    """The render backend: what the recipe says, else what the user's environment says, else EGL. Never switched."""
    named = {
        "render_backend": wanted,
        "MUJOCO_GL": environ.get("MUJOCO_GL"),
        "PYOPENGL_PLATFORM": environ.get("PYOPENGL_PLATFORM"),
    }
    chosen = {source: value.lower() for source, value in named.items() if value}
    listing = ", ".join(f"{source}={value}" for source, value in chosen.items())
    if len(set(chosen.values())) > 1:
        raise BadInput(f"render settings contradict each other: {listing}; unset one or make them equal")
    backend = next(iter(chosen.values()), "egl")
    if backend not in BACKENDS:
        raise BadInput(f"no such headless render backend: {listing}; use egl or osmesa")
    return backend


def check_versions() -> str | None:
    """What of the installed simulator differs a little from the tested one, in one sentence; None when nothing does.

    Raises BadInput for versions with which LIBERO's tasks are not themselves.
    """
    versions = simulator_versions()
    mujoco, robosuite = versions["mujoco"], versions["robosuite"]
    if not robosuite.startswith(("1.4.", UNKNOWN)):
        raise BadInput(
            f"robosuite {robosuite} is not the 1.4 that LIBERO's tasks and controllers are made for; "
            "run: pip install --no-deps -r requirements-simulator.txt"
        )
    release = tuple(int(part) for part in re.findall(r"\d+", mujoco)[:3])
    if release >= (3, 4):
        raise BadInput(
            f"mujoco {mujoco} changes the contacts of LIBERO's tasks (a bowl no longer settles into a ramekin: "
            "98 % -> 12 % success); run: pip install mujoco==3.3.0"
        )
    if (3, 2, 7) <= release <= (3, 3, 2):
        return None
    return (
        f"mujoco {mujoco} draws or simulates LIBERO differently from 3.2.7 .. 3.3.2, and 3.3.0 is tested; "
        "run: pip install mujoco==3.3.0"
    )


def simulator_versions() -> dict[str, str]:
    """Versions of mujoco, robosuite and LIBERO, read without importing them. Raises BadInput when one is missing."""
    packages = {
        "mujoco": ("mujoco", "-r requirements.txt"),
        "robosuite": ("robosuite", "--no-deps -r requirements-simulator.txt"),
        "libero": ("hf-libero", "--no-deps -r requirements-simulator.txt"),
    }
    versions = {}
    for module, (package, requirement) in packages.items():
        if importlib.util.find_spec(module) is None:
            raise BadInput(f"{module} is not installed; run: pip install {requirement}")
        try:
            versions[module] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # copied or cloned here, not installed
            versions[module] = UNKNOWN
    return versions


def _check_libraries(backend: str) -> None:
    libraries, packages = BACKENDS[backend]
    for library in libraries:
        try:
            ctypes.CDLL(library)
        except OSError:
            raise BadInput(
                f"render backend {backend}: system library {library} is missing; run: apt-get install {packages}"
            ) from None


def write_libero_config(parent: Path) -> Path:
    """Write the config.yaml without which `import libero.libero` asks a question on stdin; returns its folder.

    Every installation has a folder of its own below `parent`, because the file names its paths. Every process writes
    the same text to a file of its own and renames it, so that no reader sees half a file.
    """
    root = libero_root()
    folder = parent / hashlib.sha256(str(root).encode()).hexdigest()[:16]
    paths = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": root.parent / "datasets",
        "assets": root / "assets",  # not read by hf-libero, see envs.simulator
    }
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
        yaml.safe_dump({key: str(path) for key, path in paths.items()}, file)
    os.replace(file.name, folder / "config.yaml")
    return folder


def _load_triton_before_mesa() -> None:
    """Import torch._dynamo now if this process uses torch.

    Mesa's software renderer brings its own LLVM; a process that has loaded it and imports triton afterwards (the first
    torch.optim.AdamW does) dies of a segmentation fault. The other order is harmless.
    """
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")


def _quiet_robosuite() -> None:
    """No /tmp/robosuite.log (another user's file would be a PermissionError) and no note about "private macros"."""
    if "robosuite" in sys.modules:
        return
    package = importlib.util.find_spec("robosuite")
    if package is None or package.origin is None:
        raise BadInput("robosuite is not installed; run: pip install --no-deps -r requirements-simulator.txt")
    # robosuite opens the log file while it is imported: its settings have to be changed before, in a module of theirs.
    spec = importlib.util.spec_from_file_location("robosuite.macros", Path(package.origin).parent / "macros.py")
    assert spec is not None
    assert spec.loader is not None, "the name ends in .py"
    macros = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    macros.FILE_LOGGING_LEVEL = None  # type: ignore[attr-defined]  # a variable of that module
    sys.modules["robosuite.macros"] = macros
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)


@contextmanager
def egl_device(index: int) -> Iterator[None]:
    """Let robosuite pick EGL device `index` while it is imported and makes its first GL context.

    It takes the EGL index from CUDA_VISIBLE_DEVICES and asserts that MUJOCO_EGL_DEVICE_ID is contained in it; equal
    values satisfy both. The learner in this process needs its own CUDA_VISIBLE_DEVICES back afterwards.
    """
    names = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID")
    saved = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(index)))
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
