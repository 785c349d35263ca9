"""Speed up LIBERO's env exactly: the same numbers and pixels for a fraction of the work.

Only instances are changed; a class is changed only while an instance is built. So LIBERO's own env can run beside ours,
as in the tests. `domain` is LIBERO's `BDDLBaseDomain`, built with hard_reset=False. Import this module after calling
`envs.libero_imports.prepare_imports`. The robot's controller is in `envs.lean_controller`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import mujoco
import numpy as np
from robosuite.models import assets_root
from robosuite.utils.binding_utils import MjSim

from envs.lean_controller import LeanController

if TYPE_CHECKING:
    from libero.libero.envs.bddl_base_domain import BDDLBaseDomain

PROPRIO_OBSERVABLES = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
HIDDEN_GROUP = mujoco.mjNGROUP - 1  # a group of geoms that is not drawn: robosuite draws groups 1 and 2
MARGIN = 1e-3  # metres: far more than the rounding errors of rendering in single precision


# ------------------------------------------------------------------------------------------------------------ memory


def load_lean(xml: str, pack: Path) -> MjSim:
    """Load a model in place of `MjSim.from_xml_string`, but every texture only once, and the robot as the pack has it.

    Two equal bowls would load their textures twice: 50 MB in main memory, and more in a renderer. The returned MjSim
    has one more attribute: `as_loaded`, the positions (nbody, 3) and quaternions (nbody, 4) of the bodies before
    fixtures are placed.
    """
    mjcf = ElementTree.fromstring(xml)
    _drop_repeated_textures(mjcf)
    _take_meshes_of_pack(mjcf, pack)
    sim = MjSim(mujoco.MjModel.from_xml_string(ElementTree.tostring(mjcf, "unicode")))
    # MuJoCo keeps the source of the last model that it compiled: compile an empty one to free it.
    mujoco.MjModel.from_xml_string("<mujoco/>")
    sim.as_loaded = (sim.model.body_pos.copy(), sim.model.body_quat.copy())
    return sim


def _drop_repeated_textures(mjcf: ElementTree.Element) -> None:
    """Remove textures that differ from an earlier one in their name only; their materials then use the earlier one."""
    (assets,) = mjcf.findall("asset")
    first_names: dict[frozenset, str] = {}  # a texture's attributes without its name -> the first such name
    for texture in assets.findall("texture[@name]"):
        name = texture.get("name", "")
        first_name = first_names.setdefault(frozenset(texture.attrib.items() - {("name", name)}), name)
        if first_name != name:
            assets.remove(texture)
            for material in assets.findall(f"material[@texture='{name}']"):
                material.set("texture", first_name)


def _take_meshes_of_pack(mjcf: ElementTree.Element, pack: Path) -> None:
    """Replace robosuite's meshes by those of the pack's folder `robosuite`: the same robot drawn with fewer faces."""
    for mesh in mjcf.findall("asset/mesh[@file]"):
        file = Path(mesh.get("file", ""))
        if file.is_relative_to(assets_root):
            replacement = pack / "robosuite" / file.relative_to(assets_root).with_suffix(".obj")
            if replacement.is_file():
                mesh.set("file", str(replacement))


def release_memory(domain: BDDLBaseDomain) -> None:
    """Give the memory that was needed only for building back to the system.

    The model's textures are freed, too, and read as zeros afterwards: the renderer has its own copy.
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
    """Within this block `sim` computes positions and velocities once a physics step instead of three times.

    robosuite calls mj_forward, then mj_forward again in its controller, then mj_step, which begins with the same
    computation. Only the constraint forces have to be solved three times, for equal results to the last bit: the solver
    starts from the previous solution (`qacc_warmstart`).
    """
    model = sim.model._model
    data = sim.data._data
    is_fresh = False  # whether the computed positions and velocities belong to the current state

    def forward() -> None:
        nonlocal is_fresh
        stage = mujoco.mjtStage.mjSTAGE_VEL if is_fresh else mujoco.mjtStage.mjSTAGE_NONE
        mujoco.mj_forwardSkip(model, data, stage, 1)  # 1: skip the sensors, because nobody reads them
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
    try:
        yield
    finally:
        del sim.forward, sim.step  # the methods of the class are used again


def prepare_soft_reset(domain: BDDLBaseDomain) -> None:
    """Let `soft_reset` restore the places of the fixtures, and `qacc_warmstart`, as LIBERO's hard reset does.

    `qacc_warmstart` depends on the number and the states of the forward passes that a hard reset makes.
    """
    sim = domain.sim

    def reset_data() -> None:
        """Replaces MjSim.reset: leave the data as after loading the model and making a renderer for it."""
        sim.model.body_pos[:], sim.model.body_quat[:] = sim.as_loaded
        mujoco.mj_resetData(sim.model._model, sim.data._data)
        sim.forward()
        sim.forward()

    sim.reset = reset_data
    # LIBERO appends these samplers (for open drawers and lit stoves) again whenever it loads the model. After one hard
    # reset there are two of each. The second one draws random numbers, too, which changes all later placements.
    domain.object_property_initializers *= 2


def soft_reset(domain: BDDLBaseDomain) -> None:
    """Reset a prepared `domain` like LIBERO's hard reset, without rebuilding its model (0.1 s, not 1 s)."""
    gripper = domain.robots[0].gripper
    gripper.current_action = np.zeros(gripper.dof)  # robosuite's own soft reset keeps the last command
    domain.reset()
    domain._pre_action = LeanController(domain)


# --------------------------------------------------------------------------------------------------------- rendering


class CameraGate:
    """Makes a domain observe only what is read, and render only the chosen `cameras` and what is in their view.

    The image of every other camera is black. Its observable is not disabled, because that would shift the observable's
    clock and so change later images.
    """

    def __init__(self, domain: BDDLBaseDomain) -> None:
        self.cameras: tuple[str, ...] = ()  # names of the cameras that render
        self.seconds = 0.0  # spent on rendering; the user of the gate sets it back to 0
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
        """Make this domain's GL context current, because robosuite draws into, and deletes from, the current one."""
        self._domain.sim._render_context_offscreen.gl_ctx.make_current()

    def _gated(self, camera: str, render: Callable, black: np.ndarray) -> Callable:
        @wraps(render)  # robosuite marks sensors by attributes of their functions
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
    """Within this block geoms outside the square view of `camera` belong to a group that is not drawn.

    MuJoCo itself would send all their triangles to the renderer. If a mirror or a shadow could show geoms from outside
    the view, everything is drawn.
    """
    materials = model.geom_matid[model.geom_matid >= 0]
    shows_all = model.light_castshadow.any() or model.mat_reflectance[materials].any()
    hidden = np.arange(0) if shows_all else out_of_view(model, data, camera)
    groups = model.geom_group[hidden]
    model.geom_group[hidden] = HIDDEN_GROUP
    try:
        yield
    finally:
        model.geom_group[hidden] = groups


def out_of_view(model: mujoco.MjModel, data: mujoco.MjData, camera: int) -> np.ndarray:
    """Indices of the geoms that the camera cannot see.

    Their bounding boxes lie wholly outside one of the five planes that bound the view.
    """
    slope = math.tan(math.radians(model.cam_fovy[camera]) / 2)
    # Normals (5, 3) of the planes, pointing into the view, in the frame of the camera, which looks along -z.
    inward = np.array([[1, 0, -slope], [-1, 0, -slope], [0, 1, -slope], [0, -1, -slope], [0, 0, -1]])
    inward /= np.linalg.norm(inward, axis=1, keepdims=True)
    inward = inward @ data.cam_xmat[camera].reshape(3, 3).T
    axes = data.geom_xmat.reshape(-1, 3, 3)
    # Centre and half the size of each bounding box, (ngeom, 3, 1), in the frame of its geom.
    centre = model.geom_aabb[:, :3, None]
    half_size = model.geom_aabb[:, 3:, None]
    centres = data.geom_xpos + (axes @ centre)[:, :, 0] - data.cam_xpos[camera]
    # How far each box reaches from its centre along each normal, (ngeom, 5).
    reach = (np.abs(inward @ axes) @ half_size)[:, :, 0]
    is_outside = (centres @ inward.T + reach).min(axis=1) < -MARGIN
    is_bounded = model.geom_rbound > 0  # geom_rbound is 0 for an infinite plane
    return np.flatnonzero(is_outside & is_bounded)
