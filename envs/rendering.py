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
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID")
CUDA_DEVICE_NV = 0x323A  # attribute of EGL_NV_device_cuda: CUDA's index of an EGL device


# --------------------------------------------------------------------------------------------------- before an import


@cache
def prepare() -> None:
    """Make this process ready to import the simulator. Raises BadInput for what the user can repair."""
    check_versions()
    backend = choose_backend()
    os.environ["MUJOCO_GL"] = backend
    os.environ["PYOPENGL_PLATFORM"] = backend
    for variable, name in HOME_WRITERS.items():
        os.environ.setdefault(variable, str(cache_dir() / name))
    os.environ["LIBERO_CONFIG_PATH"] = str(write_libero_config())
    if "torch" in sys.modules:
        # Mesa's renderer brings its own LLVM; a process that has loaded it and imports triton afterwards (the first
        # torch.optim.AdamW does) dies of a segmentation fault. The other order is harmless.
        import torch._dynamo  # noqa: F401
    _quiet_robosuite()


def choose_backend() -> str:
    """The render backend: MUJOCO_GL, else EGL. Raises BadInput if its libraries are missing; never switches."""
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
    """Versions of mujoco, robosuite and LIBERO, read without importing them. Raises BadInput when one is missing."""
    try:
        return {name: importlib.metadata.version(name) for name in ("mujoco", "robosuite", "hf-libero")}
    except importlib.metadata.PackageNotFoundError as missing:
        repair = f"run: pip install -r requirements.txt && {INSTALL_SIMULATOR}"
        raise BadInput(f"{missing.name} is not installed; {repair}") from None


def write_libero_config() -> Path:
    """Write the config.yaml without which `import libero.libero` asks a question on stdin; returns its folder."""
    root = libero_root()
    # Every installation of LIBERO has a folder of its own.
    folder = cache_dir() / "libero" / hashlib.sha256(str(root).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "benchmark_root": str(root),
        "bddl_files": str(root / "bddl_files"),
        "init_states": str(root / "init_files"),
        "assets": str(root / "assets"),
        "datasets": str(root / "../datasets"),
    }
    write_json(folder / "config.yaml", config)  # JSON is YAML, too
    return folder


def _quiet_robosuite() -> None:
    """No /tmp/robosuite.log (another user's file would be a PermissionError) and no note about "private macros"."""
    if "robosuite" in sys.modules:
        return
    # robosuite opens the log file while it is imported, so its settings have to be changed before: load the module of
    # its settings alone, and put it where robosuite's import finds it.
    (package,) = importlib.util.find_spec("robosuite").submodule_search_locations  # type: ignore[union-attr, misc]
    macros = types.ModuleType("robosuite.macros")
    macros.__dict__.update(runpy.run_path(f"{package}/macros.py", run_name="robosuite.macros"))
    macros.__dict__["FILE_LOGGING_LEVEL"] = None
    sys.modules["robosuite.macros"] = macros
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)


# ----------------------------------------------------------------------------------------------------------- devices


@contextmanager
def render_device() -> Iterator[int | None]:
    """Within this block robosuite and MuJoCo are imported for, and make GL contexts on, the right EGL device."""
    device = choose_egl_device() if os.environ["MUJOCO_GL"] == "egl" else None
    # robosuite asserts that MUJOCO_EGL_DEVICE_ID is in CUDA_VISIBLE_DEVICES, which the learner needs back afterwards.
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
    """EGL's index of the device to render on: MUJOCO_EGL_DEVICE_ID, else that of the learner's GPU, else 0 (Mesa).

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
    """CUDA's index of an EGL device, or None if it is no GPU; CUDA_VISIBLE_DEVICES already applies to it."""
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


def find_renderer() -> str:
    """Make a GL context; returns its device and what the driver calls itself. A question for `envs.worker.ask`."""
    prepare()
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
    """Turn one frame (256, 256, 3) by 180 degrees: the cameras of LIBERO and Meta-World stand on their heads."""
    return np.ascontiguousarray(image[::-1, ::-1])
