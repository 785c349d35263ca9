"""Choose the EGL device on which MuJoCo draws. EGL needs no display; without a GPU Mesa draws in software."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from contracts import BadInput
from envs.cache import choose_library_caches

LIBRARIES = ("libEGL.so.1", "libOpenGL.so.0")
REPAIR = (
    "install libEGL, libOpenGL and Mesa's drivers (Debian, Ubuntu: sudo apt-get install libegl1 libopengl0 "
    "libgl1-mesa-dri; Fedora: sudo dnf install libglvnd-egl libglvnd-opengl mesa-libEGL mesa-dri-drivers); in a "
    "container with an NVIDIA GPU start it with NVIDIA_DRIVER_CAPABILITIES=all"
)
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID")
CUDA_DEVICE_NV = 0x323A  # EGL_CUDA_DEVICE_NV of EGL_NV_device_cuda: asks for CUDA's index of an EGL device
SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast", "software")


def prepare_gl() -> None:
    """Set the environment variables that MuJoCo, PyOpenGL and the drivers read when they start. Raises BadInput."""
    for library in LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            raise BadInput(f"system library {library} is missing; {REPAIR}") from None
    os.environ["MUJOCO_GL"] = "egl"
    os.environ["PYOPENGL_PLATFORM"] = "egl"
    choose_library_caches()


@contextmanager
def render_device() -> Iterator[str]:
    """Import MuJoCo and robosuite and make GL contexts within this block: they then use the right EGL device.

    Yields EGL's index of the device.
    """
    device = choose_egl_device()
    # robosuite asserts that MUJOCO_EGL_DEVICE_ID is in CUDA_VISIBLE_DEVICES, so both are set within this block. The
    # learner needs the user's CUDA_VISIBLE_DEVICES afterwards.
    saved = {name: os.environ.get(name) for name in DEVICE_VARIABLES}
    os.environ.update(dict.fromkeys(DEVICE_VARIABLES, device))
    try:
        yield device
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def choose_egl_device() -> str:
    """EGL's index of the device to render on: MUJOCO_EGL_DEVICE_ID, else the learner's GPU, else the first that works.

    Without a device that works it is 0.
    """
    users_choice = os.environ.get("MUJOCO_EGL_DEVICE_ID")
    if users_choice:
        return users_choice
    from mujoco.egl import egl_ext

    learner = int(os.environ.get("LOCAL_RANK", "0"))
    devices = egl_ext.eglQueryDevicesEXT()
    cuda_indices = [_cuda_index(device) for device in devices]
    if learner in cuda_indices:
        return str(cuda_indices.index(learner))
    # MuJoCo tries no other device than the one that it is told, and this user may not be allowed to open device 0.
    working = (index for index, device in enumerate(devices) if _can_be_opened(device))
    return str(next(working, 0))


def _cuda_index(device: ctypes.c_void_p) -> int | None:
    """CUDA's index of an EGL device (counted among CUDA_VISIBLE_DEVICES), or None if the device is no GPU."""
    from mujoco.egl import egl_ext

    # EGLBoolean eglQueryDeviceAttribEXT(EGLDeviceEXT, EGLint, EGLAttrib *)
    query_type = ctypes.CFUNCTYPE(
        ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t)
    )
    query = query_type(egl_ext.eglGetProcAddress("eglQueryDeviceAttribEXT"))
    index = ctypes.c_ssize_t()
    has_index = query(device, CUDA_DEVICE_NV, ctypes.byref(index))
    egl_ext.eglGetError()  # a device that is no GPU leaves EGL_BAD_ATTRIBUTE behind
    return index.value if has_index else None


def _can_be_opened(device: ctypes.c_void_p) -> bool:
    """Whether a display can be made on an EGL device, as MuJoCo makes it."""
    from mujoco.egl import egl_ext
    from OpenGL.error import GLError

    try:
        display = egl_ext.eglGetPlatformDisplayEXT(egl_ext.EGL_PLATFORM_DEVICE_EXT, device, None)
        return display != egl_ext.EGL_NO_DISPLAY and bool(egl_ext.eglInitialize(display, None, None))
    except GLError:
        return False


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
    return f"EGL device {device}: {renderer} ({vendor})"
