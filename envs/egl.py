"""Which EGL device renders: EGL numbers the GPUs in its own order, not in CUDA's."""

import ctypes
import os

from envs.setup import BACKENDS
from errors import BadInput

# GPU memory of one simulator's EGL context with a LIBERO scene: 1.0 GiB for 8 of them on an H200.
GPU_BYTES_PER_RENDERER = 130 * 2**20

REPAIR = (
    f"run: apt-get install {BACKENDS['egl'][1]}; in a container with an NVIDIA GPU start it with "
    "NVIDIA_DRIVER_CAPABILITIES=all; or try MUJOCO_GL=osmesa"
)
_EGL_CUDA_DEVICE_NV = 0x323A  # attribute of EGL_NV_device_cuda: CUDA's number of an EGL device


def choose_egl_device(render_gpu: int | None) -> int:
    """Index of the EGL device to render on; call it after `envs.setup.prepare`.

    The recipe's `render_gpu`, else MUJOCO_EGL_DEVICE_ID, else the GPU where this process's learner
    runs, else the first device that there is (on a machine without GPU: Mesa's software renderer).
    """
    from mujoco.egl import egl_ext

    devices = egl_ext.eglQueryDevicesEXT()
    wanted = os.environ.get("MUJOCO_EGL_DEVICE_ID", "") if render_gpu is None else str(render_gpu)
    if wanted and not (wanted.isdigit() and int(wanted) < len(devices)):
        source = "MUJOCO_EGL_DEVICE_ID" if render_gpu is None else "render_gpu"
        raise BadInput(f"{source}={wanted}: EGL sees {len(devices)} device(s), numbered from 0; unset it or correct it")
    index = int(wanted) if wanted else _device_of_learner(devices)
    if not devices or not _initialises(devices[index]):
        raise BadInput(f"EGL device {index} of {len(devices)} cannot be initialised; {REPAIR}")
    return index


def _device_of_learner(devices: list) -> int:
    """The EGL device of the learner's GPU: CUDA's first, under `accelerate launch` number LOCAL_RANK.

    The numbers of EGL_NV_device_cuda already obey CUDA_VISIBLE_DEVICES.
    """
    learner = int(os.environ.get("LOCAL_RANK", "0"))
    ordinals = [_cuda_ordinal(device) for device in devices]
    return ordinals.index(learner) if learner in ordinals else 0


def _cuda_ordinal(device: ctypes.c_void_p) -> int | None:
    from mujoco.egl import egl_ext
    from OpenGL import error

    prototype = ctypes.CFUNCTYPE(
        ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t)
    )  # EGLBoolean eglQueryDeviceAttribEXT(EGLDeviceEXT, EGLint, EGLAttrib *)
    address = egl_ext.eglGetProcAddress("eglQueryDeviceAttribEXT")
    value = ctypes.c_ssize_t(-1)
    try:
        found = prototype(address)(device, _EGL_CUDA_DEVICE_NV, ctypes.byref(value)) if address else False
        egl_ext.eglGetError()  # a device that is no GPU leaves EGL_BAD_ATTRIBUTE behind
    except error.GLError:
        return None
    return value.value if found else None


def _initialises(device: ctypes.c_void_p) -> bool:
    from mujoco.egl import egl_ext
    from OpenGL import error

    try:
        display = egl_ext.eglGetPlatformDisplayEXT(egl_ext.EGL_PLATFORM_DEVICE_EXT, device, None)
        return bool(egl_ext.eglInitialize(display, None, None))
    except error.GLError:
        return False
