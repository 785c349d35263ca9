"""Exact speed-ups of LIBERO's env: the same numbers and pixels for a fraction of the work.

Only single instances are changed, and a class only while one is built: LIBERO's own env can run beside ours, as in the
tests. `domain` is LIBERO's `BDDLBaseDomain`, built with hard_reset=False. Import this after `envs.rendering.prepare`.
The robot's controller has a file of its own: `envs.lean_controller`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import mujoco
import numpy as np
from robosuite.utils.binding_utils import MjSim

from envs.lean_controller import LeanController

if TYPE_CHECKING:
    from libero.libero.envs.bddl_base_domain import BDDLBaseDomain

PROPRIO_OBSERVABLES = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
HIDDEN_GROUP = mujoco.mjNGROUP - 1  # a group of geoms that is not drawn: robosuite draws groups 1 and 2
MARGIN = 1e-3  # metres, far above the rounding of the single-precision pipeline that draws
TEXTURE_STRIDE = 97  # every so many pixels are enough for a mean colour


# ------------------------------------------------------------------------------------------------------------ memory


def load_lean(xml: str) -> MjSim:
    """Load a model with every texture once; it stands in for `MjSim.from_xml_string`.

    Two bowls bring their textures twice: 50 MB in main memory, and more in a renderer. The returned MjSim has two more
    attributes: `as_loaded`, positions and rotations of the bodies before fixtures are placed, and `texture_colours`.
    """
    mjcf = ElementTree.fromstring(xml)
    _drop_repeated_textures(mjcf)
    sim = MjSim(mujoco.MjModel.from_xml_string(ElementTree.tostring(mjcf, "unicode")))
    mujoco.MjModel.from_xml_string("<mujoco/>")  # MuJoCo keeps the source of what it compiled last
    sim.as_loaded = (sim.model.body_pos.copy(), sim.model.body_quat.copy())
    model = sim.model._model
    sim.texture_colours = [texture_colour(model, texture) for texture in range(model.ntex)]
    return sim


def _drop_repeated_textures(mjcf: ElementTree.Element) -> None:
    """Remove textures that differ from an earlier one by their name only, and let their materials use the earlier."""
    (assets,) = mjcf.findall("asset")
    first_names: dict[frozenset, str] = {}  # the attributes of a texture without its name -> its first name
    for texture in assets.findall("texture[@name]"):
        name = texture.get("name", "")
        first_name = first_names.setdefault(frozenset(texture.attrib.items() - {("name", name)}), name)
        if first_name != name:
            assets.remove(texture)
            for material in assets.findall(f"material[@texture='{name}']"):
                material.set("texture", first_name)


def texture_colour(model: mujoco.MjModel, texture: int) -> np.ndarray:
    """Mean colour (3,) of a texture, in 0 to 1."""
    start = model.tex_adr[texture]
    channels = model.tex_nchannel[texture]
    size = model.tex_height[texture] * model.tex_width[texture] * channels
    pixels = model.tex_data[start : start + size].reshape(-1, channels)
    return pixels[::TEXTURE_STRIDE, :3].mean(axis=0) / 255


def release_memory(domain: BDDLBaseDomain) -> None:
    """Give back the memory that only building took.

    The model's textures go, too, and become zeros: the renderer has a copy of its own.
    """
    libc = ctypes.CDLL(None)
    texels = domain.sim.model.tex_data
    first_page = -(-texels.ctypes.data // mmap.PAGESIZE)
    start = first_page * mmap.PAGESIZE
    size = max(0, texels.ctypes.data + texels.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    libc.malloc_trim(0)


# --------------------------------------------------------------------------------------------------- physics and reset


@contextmanager
def lean_physics(sim: MjSim) -> Iterator[None]:
    """Within this block `sim` computes positions and velocities once a physics step, not three times.

    robosuite calls mj_forward, mj_forward again in its controller, and mj_step, which begins with the same. Only the
    constraint forces have to be repeated: each solution is the start of the next (`qacc_warmstart`), to the last bit.
    """
    model = sim.model._model
    data = sim.data._data
    is_fresh = False  # positions and velocities belong to the current state

    def forward() -> None:
        nonlocal is_fresh
        stage = mujoco.mjtStage.mjSTAGE_VEL if is_fresh else mujoco.mjtStage.mjSTAGE_NONE
        mujoco.mj_forwardSkip(model, data, stage, 1)  # without sensors: nobody reads them
        is_fresh = True

    def step(with_udd: bool = True) -> None:
        nonlocal is_fresh
        if is_fresh:
            mujoco.mj_step2(model, data)
        else:
            mujoco.mj_step(model, data)
        is_fresh = False

    sim.forward = forward
    sim.step = step
    yield  # no `finally`: after a fault nobody uses `sim` any more
    del sim.forward, sim.step  # the methods of the class show through again


def soft_reset(domain: BDDLBaseDomain) -> Callable[[], None]:
    """A reset of `domain` without rebuilding its model (0.1 s instead of 1 s), with the outcome of LIBERO's hard reset.

    robosuite's own soft reset does not restore where the fixtures stood, the gripper's last command, and
    `qacc_warmstart`, which depends on the number and the states of the forward passes that a hard reset makes.
    """
    sim = domain.sim
    gripper = domain.robots[0].gripper

    def reset_data() -> None:
        """In place of MjSim.reset: leave what loading the model afresh and making a renderer for it would leave."""
        sim.model.body_pos[:], sim.model.body_quat[:] = sim.as_loaded
        mujoco.mj_resetData(sim.model._model, sim.data._data)
        sim.forward()
        sim.forward()

    def reset() -> None:
        gripper.current_action = np.zeros(gripper.dof)
        domain.reset()
        domain._pre_action = LeanController(domain)

    sim.reset = reset_data
    # LIBERO appends these samplers (open drawers, lit stoves) once more whenever it loads the model. After one hard
    # reset there are two of each, and the second draw shifts the random numbers of all that is placed after it.
    domain.object_property_initializers *= 2
    return reset


# --------------------------------------------------------------------------------------------------------- rendering


class CameraGate:
    """Makes a domain observe only what is read, and render only the chosen `cameras` and what they see.

    The image of another camera is black. To disable its observable would shift its clock and so give other images.
    """

    def __init__(self, domain: BDDLBaseDomain) -> None:
        self.cameras: tuple[str, ...] = ()  # that render
        self.seconds = 0.0  # of rendering since somebody set it to 0
        self._domain = domain
        # The observables of objects and joints are never read.
        names = [*PROPRIO_OBSERVABLES, *(f"{camera}_image" for camera in domain.camera_names)]
        domain._observables = {name: domain._observables[name] for name in names}
        sizes = zip(domain.camera_names, domain.camera_heights, domain.camera_widths, strict=True)
        for camera, height, width in sizes:
            observable = domain._observables[f"{camera}_image"]
            black = np.zeros((height, width, 3), np.uint8)
            observable._sensor = self._gated(camera, observable._sensor, black)

    def make_gl_current(self) -> None:
        """Choose this domain's GL context: robosuite draws into, and deletes from, whichever is current."""
        self._domain.sim._render_context_offscreen.gl_ctx.make_current()

    def _gated(self, camera: str, render: Callable, black: np.ndarray) -> Callable:
        @wraps(render)  # robosuite keeps its marks on functions
        def sensor(obs_cache: dict) -> np.ndarray:
            if camera not in self.cameras:
                return black
            started = time.perf_counter()
            self.make_gl_current()
            sim = self._domain.sim
            with only_what_is_in_view(sim.model._model, sim.data._data, sim.model.camera_name2id(camera)):
                image = render(obs_cache)
            self.seconds += time.perf_counter() - started
            return image

        return sensor


@contextmanager
def only_what_is_in_view(model: mujoco.MjModel, data: mujoco.MjData, camera: int) -> Iterator[None]:
    """Within this block geoms outside the square view of `camera` are in a group that is not drawn.

    MuJoCo leaves them to the renderer, triangle by triangle. If mirrors or shadows could show them, all are drawn.
    """
    materials = model.geom_matid[model.geom_matid >= 0]
    shows_all = model.light_castshadow.any() or model.mat_reflectance[materials].any()
    hidden = np.arange(0) if shows_all else out_of_view(model, data, camera)
    groups = model.geom_group[hidden]
    model.geom_group[hidden] = HIDDEN_GROUP
    yield
    model.geom_group[hidden] = groups


def out_of_view(model: mujoco.MjModel, data: mujoco.MjData, camera: int) -> np.ndarray:
    """Indices of the geoms whose bounding boxes lie wholly outside one of the five planes that bound the view."""
    slope = math.tan(math.radians(model.cam_fovy[camera]) / 2)
    # Normals of the planes that point into the view, in the camera's frame: it looks along -z.
    inward = np.array([[1, 0, -slope], [-1, 0, -slope], [0, 1, -slope], [0, -1, -slope], [0, 0, -1]])
    inward /= np.linalg.norm(inward, axis=1, keepdims=True)
    inward = inward @ data.cam_xmat[camera].reshape(3, 3).T
    axes = data.geom_xmat.reshape(-1, 3, 3)
    # Centre and half the size of each bounding box, in the frame of its geom.
    centre = model.geom_aabb[:, :3, None]
    half_size = model.geom_aabb[:, 3:, None]
    centres = data.geom_xpos + (axes @ centre)[:, :, 0] - data.cam_xpos[camera]
    reach = (np.abs(inward @ axes) @ half_size)[:, :, 0]  # (ngeom, 5): from the centre along each normal
    is_outside = (centres @ inward.T + reach).min(axis=1) < -MARGIN
    is_bounded = model.geom_rbound > 0  # it is 0 for an infinite plane
    return np.flatnonzero(is_outside & is_bounded)
