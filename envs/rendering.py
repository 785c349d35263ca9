"""Prepare this process to import MuJoCo, robosuite and LIBERO, and choose the device that renders.

At import these libraries read environment variables, write into HOME and /tmp, and ask a question on stdin.
`prepare_imports` sets the variables and prevents the rest, so call it first.
"""

import ctypes
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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from contracts import BadInput, replaced
from envs.tasks import cache_dir, libero_root, reported_cache_errors

BACKENDS = {  # render backend -> (shared libraries that it needs, Debian packages that contain them)
    "egl": (("libEGL.so.1", "libOpenGL.so.0"), "libegl1 libopengl0 libgl1-mesa-dri"),
    "osmesa": (("libOSMesa.so.8", "libGL.so.1"), "libosmesa6 libgl1"),
}
IN_CONTAINERS = "in a container with an NVIDIA GPU start it with NVIDIA_DRIVER_CAPABILITIES=all"
REPAIR = f"run: apt-get install {BACKENDS['egl'][1]}; {IN_CONTAINERS}; or try MUJOCO_GL=osmesa"
MIN_CONTRAST = 5.0  # least standard deviation of a frame's pixel values (0 to 255); in an empty frame it is 0
INSTALL_SIMULATOR = "pip install --no-deps -r requirements-simulator.txt"
# Environment variable -> subfolder of our cache for what a library would otherwise write into the user's home. The
# drivers' shader caches are worth keeping after a run.
HOME_WRITERS = {
    "MPLCONFIGDIR": "matplotlib",  # LIBERO imports it
    "MESA_SHADER_CACHE_DIR": "mesa",
    "__GL_SHADER_DISK_CACHE_PATH": "nvidia",
    "NUMBA_CACHE_DIR": "numba",  # robosuite would write into site-packages
}
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID")
CUDA_DEVICE_NV = 0x323A  # EGL_CUDA_DEVICE_NV of EGL_NV_device_cuda: asks for CUDA's index of an EGL device


# --------------------------------------------------------------------------------------------------- before an import


@cache
def prepare_imports() -> None:
    """Make this process ready to import the simulator. Raises BadInput for problems that the user can repair."""
    check_versions()
    backend = choose_backend()
    os.environ["MUJOCO_GL"] = backend
    os.environ["PYOPENGL_PLATFORM"] = backend
    for variable, name in HOME_WRITERS.items():
        os.environ.setdefault(variable, str(cache_dir() / name))
    os.environ["LIBERO_CONFIG_PATH"] = str(write_libero_config())
    if "torch" in sys.modules:
        # Mesa's renderer brings its own LLVM. A process that loads Mesa first and triton afterwards dies of a
        # segmentation fault, and the first torch.optim.AdamW imports triton. So import triton now: that order works.
        import torch._dynamo  # noqa: F401
    _quiet_robosuite()


def choose_backend() -> str:
    """The render backend, "egl" or "osmesa": MUJOCO_GL, else EGL.

    Raises BadInput if its libraries are missing, rather than switch to the other backend.
    """
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
    """Check the versions of the simulator's packages; returns a warning for the user, or None.

    Raises BadInput for versions with which LIBERO's tasks would not work.
    """
    versions = simulator_versions()
    mujoco = versions["mujoco"]
    robosuite = versions["robosuite"]
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
    content = json.dumps(config)  # every JSON file is a YAML file, too
    with reported_cache_errors(cache_dir()):
        # Every worker comes here, and after the first one there is nothing to write.
        if not path.is_file() or path.read_text() != content:
            folder.mkdir(parents=True, exist_ok=True)
            with replaced(path) as draft:
                draft.write_text(content)
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


# ----------------------------------------------------------------------------------------------------------- devices


@contextmanager
def render_device() -> Iterator[int | None]:
    """Import MuJoCo and robosuite and make GL contexts within this block: they then use the right EGL device.

    Yields EGL's index of the device, or None for OSMesa. Raises BadInput (`choose_egl_device`).
    """
    device = choose_egl_device() if os.environ["MUJOCO_GL"] == "egl" else None
    # robosuite asserts that MUJOCO_EGL_DEVICE_ID is in CUDA_VISIBLE_DEVICES, so both are set within this block. The
    # learner needs the user's CUDA_VISIBLE_DEVICES afterwards.
    saved = {name: os.environ.get(name) for name in DEVICE_VARIABLES}
    os.environ.update(dict.fromkeys(DEVICE_VARIABLES, str(device or 0)))
    try:
        yield device
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def choose_egl_device() -> int:
    """EGL's index of the device to render on: MUJOCO_EGL_DEVICE_ID, else the learner's GPU, else 0 (Mesa).

    Raises BadInput if there is no such device, or if its driver does not start.
    """
    from mujoco.egl import egl_ext
    from OpenGL.error import GLError

    devices = egl_ext.eglQueryDevicesEXT()
    users_choice = os.environ.get("MUJOCO_EGL_DEVICE_ID", "")
    if users_choice:
        if not users_choice.isdigit() or int(users_choice) >= len(devices):
            raise BadInput(
                f"MUJOCO_EGL_DEVICE_ID={users_choice}: EGL sees {len(devices)} device(s); unset it or correct it"
            )
        index = int(users_choice)
    else:
        learner = int(os.environ.get("LOCAL_RANK", "0"))
        cuda_indices = [_cuda_index(device) for device in devices]
        index = cuda_indices.index(learner) if learner in cuda_indices else 0
    try:
        display = egl_ext.eglGetPlatformDisplayEXT(egl_ext.EGL_PLATFORM_DEVICE_EXT, devices[index], None)
        works = egl_ext.eglInitialize(display, None, None)
    except (IndexError, GLError):  # there is no device, or its driver does not start
        works = False
    if not works:
        raise BadInput(f"EGL device {index} of {len(devices)} cannot be initialised; {REPAIR}")
    return index


def _cuda_index(device: ctypes.c_void_p) -> int | None:
    """CUDA's index of an EGL device (counted among CUDA_VISIBLE_DEVICES), or None if the device is no GPU."""
    from mujoco.egl import egl_ext
    from OpenGL.error import GLError

    # EGLBoolean eglQueryDeviceAttribEXT(EGLDeviceEXT, EGLint, EGLAttrib *)
    query_type = ctypes.CFUNCTYPE(
        ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t)
    )
    address = egl_ext.eglGetProcAddress("eglQueryDeviceAttribEXT")
    index = ctypes.c_ssize_t(-1)
    has_index = False
    try:
        if address:
            has_index = query_type(address)(device, CUDA_DEVICE_NV, ctypes.byref(index))
        egl_ext.eglGetError()  # a device that is no GPU leaves EGL_BAD_ATTRIBUTE behind
    except GLError:
        return None
    return index.value if has_index else None


SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast", "software")


def renders_in_software(renderer: str) -> bool:
    """Whether a renderer that `find_renderer` has named works on the CPU."""
    return any(name in renderer.lower() for name in SOFTWARE_RENDERERS)


def find_renderer() -> str:
    """Make a GL context; returns its device and the names of renderer and vendor.

    Call it by `envs.worker.ask`, because a broken driver may hang or crash. Raises BadInput.
    """
    prepare_imports()
    with render_device() as device:
        import mujoco
        from OpenGL import GL

        context = mujoco.GLContext(64, 64)
        context.make_current()
        vendor = GL.glGetString(GL.GL_VENDOR).decode()
        renderer = GL.glGetString(GL.GL_RENDERER).decode()
        context.free()
    backend = "OSMesa" if device is None else f"EGL device {device}"
    return f"{backend}: {renderer} ({vendor})"


# ---------------------------------------------------------------------------------------------------------- pictures


def upright(image: np.ndarray) -> np.ndarray:
    """Turn one frame (256, 256, 3) by 180 degrees: LIBERO delivers images upside down."""
    return np.ascontiguousarray(image[::-1, ::-1])
