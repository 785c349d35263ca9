"""Choose the GL backend and the device on which MuJoCo draws."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from contracts import BadInput
from envs.cache import choose_library_caches

BACKENDS = {  # render backend -> (shared libraries that it needs, Debian packages that contain them)
    "egl": (("libEGL.so.1", "libOpenGL.so.0"), "libegl1 libopengl0 libgl1-mesa-dri"),
    "osmesa": (("libOSMesa.so.8", "libGL.so.1"), "libosmesa6 libgl1"),
}
IN_CONTAINERS = "in a container with an NVIDIA GPU start it with NVIDIA_DRIVER_CAPABILITIES=all"
REPAIR = f"run: apt-get install {BACKENDS['egl'][1]}; {IN_CONTAINERS}; or try MUJOCO_GL=osmesa"
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID")
CUDA_DEVICE_NV = 0x323A  # EGL_CUDA_DEVICE_NV of EGL_NV_device_cuda: asks for CUDA's index of an EGL device
SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast", "software")


def prepare_gl() -> None:
    """Set the environment variables that MuJoCo, PyOpenGL and the drivers read when they start. Raises BadInput."""
    backend = choose_backend()
    os.environ["MUJOCO_GL"] = backend
    os.environ["PYOPENGL_PLATFORM"] = backend
    choose_library_caches()


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


def renders_in_software(renderer: str) -> bool:
    """Whether a renderer that `find_renderer` has named works on the CPU."""
    return any(name in renderer.lower() for name in SOFTWARE_RENDERERS)


def find_renderer() -> str:
    """Make a GL context; returns its device and the names of renderer and vendor.

    Call it by `envs.worker.ask`, because a broken driver may hang or crash. Raises BadInput.
    """
    prepare_gl()
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
