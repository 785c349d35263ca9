"""What must be true before MuJoCo, robosuite and LIBERO are imported, and which device then draws.

They read environment variables at import, write into HOME and /tmp, and ask a question on stdin: `prepare` settles it.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import runpy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from contracts import BadInput, write_json
from envs.tasks import cache_dir, libero_root

BACKENDS = {  # render backend -> shared libraries it needs, Debian packages that bring them
    "egl": (("libEGL.so.1", "libOpenGL.so.0"), "libegl1 libopengl0 libgl1-mesa-dri"),
    "osmesa": (("libOSMesa.so.8", "libGL.so.1"), "libosmesa6 libgl1"),
}
IN_CONTAINERS = "in a container with an NVIDIA GPU start it with NVIDIA_DRIVER_CAPABILITIES=all"
REPAIR = f"run: apt-get install {BACKENDS['egl'][1]}; {IN_CONTAINERS}; or try MUJOCO_GL=osmesa"
INSTALL_SIMULATOR = "pip install --no-deps -r requirements-simulator.txt"
# Where libraries keep what they would otherwise write into the user's home; the drivers' shader caches outlive a run.
HOME_WRITERS = {
    "MPLCONFIGDIR": "matplotlib",  # LIBERO imports it
    "MESA_SHADER_CACHE_DIR": "mesa",
    "__GL_SHADER_DISK_CACHE_PATH": "nvidia",
    "NUMBA_CACHE_DIR": "numba",  # robosuite would write into site-packages
}
CUDA_DEVICE_NV = 0x323A  # attribute of EGL_NV_device_cuda: CUDA's number of an EGL device


@cache
def prepare() -> None:
    """Make this process ready to import the simulator. Raises BadInput for what the user can repair."""
    check_versions()
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = choose_backend()
    for variable, name in HOME_WRITERS.items():
        os.environ.setdefault(variable, str(cache_dir() / name))
    os.environ["LIBERO_CONFIG_PATH"] = str(write_libero_config())
    if "torch" in sys.modules:
        # Mesa's renderer brings its own LLVM; a process that has loaded it and imports triton afterwards (the first
        # torch.optim.AdamW does) dies of a segmentation fault. The other order is harmless.
        import torch._dynamo  # noqa: F401
    _quiet_robosuite()


def choose_backend() -> str:
    """The render backend: what MUJOCO_GL says, else EGL, its libraries found. Never switched."""
    backend = (os.environ.get("MUJOCO_GL") or "egl").lower()
    if backend not in BACKENDS:
        raise BadInput(f"no such headless render backend: MUJOCO_GL={backend}; use egl or osmesa")
    libraries, packages = BACKENDS[backend]
    for library in libraries:
        try:
            ctypes.CDLL(library)
        except OSError:
            raise BadInput(f"system library {library} is missing; run: apt-get install {packages}") from None
    return backend


def check_versions() -> str | None:
    """A sentence if the simulator differs a little from the tested one. Raises BadInput if LIBERO's tasks would."""
    mujoco, robosuite, _ = simulator_versions().values()
    if not robosuite.startswith("1.4."):
        raise BadInput(
            f"robosuite {robosuite} is not the 1.4 that LIBERO's tasks need; run: {INSTALL_SIMULATOR}"
        )
    release = tuple(int(part) for part in re.findall(r"\d+", mujoco)[:3])
    repair = "run: pip install mujoco==3.3.0"
    if release >= (3, 4):
        raise BadInput(
            f"mujoco {mujoco} changes the contacts of LIBERO's tasks (98 % -> 12 % success); {repair}"
        )
    if (3, 2, 7) <= release <= (3, 3, 2):
        return None
    return f"mujoco {mujoco} draws or simulates LIBERO differently from 3.2.7 .. 3.3.2, and 3.3.0 is tested; {repair}"


def simulator_versions() -> dict[str, str]:
    """Versions of mujoco, robosuite and LIBERO, read without importing them. Raises BadInput when one is missing."""
    try:
        return {name: importlib.metadata.version(name) for name in ("mujoco", "robosuite", "hf-libero")}
    except importlib.metadata.PackageNotFoundError as missing:
        repair = f"run: pip install -r requirements.txt && {INSTALL_SIMULATOR}"
        raise BadInput(f"{missing.name} is not installed; {repair}") from None


def write_libero_config() -> Path:
    """Write the config.yaml without which `import libero.libero` asks a question on stdin; returns its folder."""
    root = libero_root()
    folder = (
        cache_dir() / "libero" / hashlib.sha256(str(root).encode()).hexdigest()[:16]
    )  # of this installation
    folder.mkdir(parents=True, exist_ok=True)
    parts = {
        "benchmark_root": "", "bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets",
        "datasets": "../datasets",
    }  # fmt: skip
    write_json(
        folder / "config.yaml", {name: str(root / part) for name, part in parts.items()}
    )  # JSON is YAML, too
    return folder


def _quiet_robosuite() -> None:
    """No /tmp/robosuite.log (another user's file would be a PermissionError) and no note about "private macros"."""
    if "robosuite" in sys.modules:
        return
    # robosuite opens the log file while it is imported: its settings have to be changed before, in a module of theirs.
    (package,) = importlib.util.find_spec("robosuite").submodule_search_locations  # type: ignore[union-attr, misc]
    macros = sys.modules["robosuite.macros"] = types.ModuleType("robosuite.macros")
    vars(macros).update(
        runpy.run_path(f"{package}/macros.py", run_name="robosuite.macros"), FILE_LOGGING_LEVEL=None
    )
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)


@contextmanager
def render_device() -> Iterator[int | None]:
    """Within this block robosuite and MuJoCo are imported for, and make GL contexts on, the right EGL device."""
    device = choose_egl_device() if os.environ["MUJOCO_GL"] == "egl" else None
    # robosuite asserts that the second is in the first, which the learner needs back afterwards.
    names = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID")
    saved = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(device or 0)))
    try:
        yield device
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update({name: value for name, value in saved.items() if value is not None})


def choose_egl_device() -> int:
    """EGL's number of the device to render on: MUJOCO_EGL_DEVICE_ID, else that of the learner's GPU, else 0 (Mesa)."""
    from mujoco.egl import egl_ext
    from OpenGL.error import GLError

    devices = egl_ext.eglQueryDevicesEXT()
    wanted = os.environ.get("MUJOCO_EGL_DEVICE_ID", "")
    if wanted and not (wanted.isdigit() and int(wanted) < len(devices)):
        raise BadInput(
            f"MUJOCO_EGL_DEVICE_ID={wanted}: EGL sees {len(devices)} device(s); unset it or correct it"
        )
    learner, numbers = int(os.environ.get("LOCAL_RANK", "0")), [_cuda_number(device) for device in devices]
    index = int(wanted or (numbers.index(learner) if learner in numbers else 0))
    try:
        display = egl_ext.eglGetPlatformDisplayEXT(egl_ext.EGL_PLATFORM_DEVICE_EXT, devices[index], None)
        works = egl_ext.eglInitialize(display, None, None)
    except (IndexError, GLError):  # there is no device, or its driver does not start
        works = False
    if not works:
        raise BadInput(f"EGL device {index} of {len(devices)} cannot be initialised; {REPAIR}")
    return index


def _cuda_number(device: ctypes.c_void_p) -> int | None:
    """CUDA's number of an EGL device; it already obeys CUDA_VISIBLE_DEVICES."""
    from mujoco.egl import egl_ext
    from OpenGL.error import GLError

    # EGLBoolean eglQueryDeviceAttribEXT(EGLDeviceEXT, EGLint, EGLAttrib *)
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t)
    )
    address = egl_ext.eglGetProcAddress("eglQueryDeviceAttribEXT")
    value = ctypes.c_ssize_t(-1)
    try:
        found = prototype(address)(device, CUDA_DEVICE_NV, ctypes.byref(value)) if address else False
        egl_ext.eglGetError()  # a device that is no GPU leaves EGL_BAD_ATTRIBUTE behind
    except GLError:
        return None
    return value.value if found else None


def upright(image: np.ndarray) -> np.ndarray:
    """Turn one frame (256, 256, 3) by 180 degrees: cameras of LIBERO and Meta-World stand on their heads."""
    return np.ascontiguousarray(image[::-1, ::-1])


def find_renderer() -> str:
    """Make a GL context; returns its device and what the driver calls itself: a question for `envs.worker.ask`."""
    prepare()
    with render_device() as device:
        import mujoco
        from OpenGL import GL

        context = mujoco.GLContext(64, 64)
        context.make_current()
        vendor, name = (GL.glGetString(what).decode() for what in (GL.GL_VENDOR, GL.GL_RENDERER))
    return f"{'OSMesa' if device is None else f'EGL device {device}'}: {name} ({vendor})"
