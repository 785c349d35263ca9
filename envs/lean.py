"""Exact speed-ups of LIBERO's env: the same numbers and pixels for a fraction of the work.

Single instances are changed, a class only while one is built: LIBERO's own env can run beside ours, as in the tests.
`domain` is LIBERO's `BDDLBaseDomain`, built with hard_reset=False. Import this after `envs.rendering.prepare`.
"""

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from xml.etree import ElementTree

import mujoco
import numpy as np
from robosuite.utils.binding_utils import MjSim
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error

PROPRIO_OBSERVABLES = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
HIDDEN_GROUP = mujoco.mjNGROUP - 1  # of geoms; robosuite draws groups 1 and 2
MARGIN = 1e-3  # metres, far above the rounding of the single-precision pipeline that draws


def load_lean(xml: str) -> MjSim:
    """MjSim.from_xml_string with every texture once: two bowls bring theirs twice, 50 MB here, more in a renderer."""
    mjcf = ElementTree.fromstring(xml)
    (assets,) = mjcf.findall("asset")
    names: dict[frozenset, str] = {}  # all that a texture is -> the name of the first of them
    for texture in assets.findall("texture[@name]"):
        name = texture.get("name", "")
        first = names.setdefault(frozenset(texture.attrib.items() - {("name", name)}), name)
        if first != name:
            assets.remove(texture)
            for material in assets.findall(f"material[@texture='{name}']"):
                material.set("texture", first)
    sim = MjSim(mujoco.MjModel.from_xml_string(ElementTree.tostring(mjcf, "unicode")))
    mujoco.MjModel.from_xml_string("<mujoco/>")  # MuJoCo keeps the source of what it compiled last
    sim.as_loaded = sim.model.body_pos.copy(), sim.model.body_quat.copy()  # before fixtures are placed
    sim.texture_colours = [
        texture_colour(sim.model._model, texture) for texture in range(sim.model._model.ntex)
    ]
    return sim


def texture_colour(model: mujoco.MjModel, texture: int) -> np.ndarray:
    """(3,) in 0 to 1: the mean of every hundredth pixel or so."""
    start, channels = model.tex_adr[texture], model.tex_nchannel[texture]
    size = model.tex_height[texture] * model.tex_width[texture] * channels
    return model.tex_data[start : start + size].reshape(-1, channels)[::97, :3].mean(axis=0) / 255


def release_memory(domain: Any) -> None:
    """Give back what only building took; the textures, too: the renderer has its own, and the model's become zeros."""
    libc, texels = ctypes.CDLL(None), domain.sim.model.tex_data
    start = -(-texels.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = max(0, texels.ctypes.data + texels.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    libc.malloc_trim(0)


@contextmanager
def lean_physics(sim: Any) -> Iterator[None]:
    """Within this block `sim` (MjSim) computes positions and velocities once a physics step, not three times.

    robosuite calls mj_forward, mj_forward again in its controller, and mj_step, which begins with the same. Only the
    constraint forces have to be repeated: each solution is the start of the next (`qacc_warmstart`), to the last bit.
    """
    model, data = sim.model._model, sim.data._data
    is_fresh = False  # positions and velocities belong to the current state

    def forward() -> None:
        nonlocal is_fresh
        stage = mujoco.mjtStage.mjSTAGE_VEL if is_fresh else mujoco.mjtStage.mjSTAGE_NONE
        mujoco.mj_forwardSkip(model, data, stage, 1)  # without sensors: nobody reads them
        is_fresh = True

    def step(with_udd: bool = True) -> None:
        nonlocal is_fresh
        (mujoco.mj_step2 if is_fresh else mujoco.mj_step)(model, data)
        is_fresh = False

    sim.forward, sim.step = forward, step
    yield  # after a fault nobody uses `sim` any more
    del sim.forward, sim.step  # the methods of the class show through again


class CameraGate:
    """Makes a domain observe only what is read, and render only the cameras that are in `cameras` and what they see.

    An image that is not wanted is black. To disable its observable would shift its clock and so give other images.
    """

    def __init__(self, domain: Any) -> None:
        self.cameras: tuple[str, ...] = ()
        self.seconds = 0.0  # spent rendering since somebody set it to 0
        self._domain = domain
        # Those of objects and joints are never read.
        read = (*PROPRIO_OBSERVABLES, *(f"{camera}_image" for camera in domain.camera_names))
        domain._observables = {name: domain._observables[name] for name in read}
        for camera, height, width in zip(
            domain.camera_names, domain.camera_heights, domain.camera_widths, strict=True
        ):
            observable = domain._observables[f"{camera}_image"]
            observable._sensor = self._gated(
                camera, observable._sensor, np.zeros((height, width, 3), np.uint8)
            )

    def make_gl_current(self) -> None:
        """robosuite draws into, and deletes from, whichever GL context is current: another env's, as a rule."""
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

    MuJoCo leaves them to the renderer, triangle by triangle. All stay if mirrors or shadows show what is out of view.
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
    inward = np.array(
        [[1, 0, -slope], [-1, 0, -slope], [0, 1, -slope], [0, -1, -slope], [0, 0, -1]]
    )  # it looks to -z
    inward /= np.linalg.norm(inward, axis=1, keepdims=True)
    inward = inward @ data.cam_xmat[camera].reshape(3, 3).T
    axes = data.geom_xmat.reshape(-1, 3, 3)
    centre, half_size = model.geom_aabb[:, :3, None], model.geom_aabb[:, 3:, None]  # in the frame of the geom
    centres = data.geom_xpos + (axes @ centre)[:, :, 0] - data.cam_xpos[camera]
    reach = (np.abs(inward @ axes) @ half_size)[:, :, 0]  # (ngeom, 5): from the centre along each normal
    is_outside = (centres @ inward.T + reach).min(axis=1) < -MARGIN
    return np.flatnonzero(is_outside & (model.geom_rbound > 0))  # rbound 0: an infinite plane


def soft_reset(domain: Any) -> Callable[[], None]:
    """A reset of `domain` without rebuilding its model (0.1 s instead of 1 s), with the outcome of LIBERO's hard reset.

    robosuite's soft reset keeps where the fixtures stood, the gripper's last command, and `qacc_warmstart`, which
    depends on the number and the states of the forward passes that a hard reset makes.
    """
    sim, gripper = domain.sim, domain.robots[0].gripper

    def reset_data() -> None:
        """In place of MjSim.reset: what loading the model afresh and making a renderer for it would leave."""
        sim.model.body_pos[:], sim.model.body_quat[:] = sim.as_loaded
        mujoco.mj_resetData(sim.model._model, sim.data._data)
        sim.forward()
        sim.forward()

    def reset() -> None:
        gripper.current_action = np.zeros(gripper.dof)
        domain.reset()
        domain._pre_action = lean_control(domain)

    sim.reset = reset_data
    # LIBERO appends these samplers (open drawers, lit stoves) once more whenever it loads the model. After one hard
    # reset there are two of each, and the second draw shifts the random numbers of all that is placed after it.
    domain.object_property_initializers *= 2
    return reset


def lean_control(domain: Any) -> Callable[[np.ndarray, bool], None]:
    """The robot's controller with the numbers of robosuite's and a quarter of its Python, as `_pre_action` of `domain`.

    Names and limits are looked up once an episode, the Jacobian is computed once a physics step instead of four times.
    Every product has the operands, the order and the memory layout of the original: another layout would choose another
    BLAS routine and so other last bits. For what LIBERO uses: one Panda arm, OSC_POSE control with fixed impedance,
    uncoupled, no interpolation. The next reset makes a new controller.
    """
    sim, robot = domain.sim, domain.robots[0]
    model, data = sim.model._model, sim.data._data
    c, gripper = robot.controller, robot.gripper
    site, joints, motions = sim.model.site_name2id(c.eef_name), c.qpos_index, c.qvel_index
    jacobian_pos, jacobian_ori = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    mass_matrix = np.zeros((model.nv, model.nv))
    arm, fingers = robot._ref_joint_actuator_indexes, robot._ref_joint_gripper_actuator_indexes
    arm_low, arm_high = model.actuator_ctrlrange[arm].T
    fingers_low, fingers_high = model.actuator_ctrlrange[fingers].T
    fingers_middle, fingers_reach = 0.5 * (fingers_high + fingers_low), 0.5 * (fingers_high - fingers_low)

    def measure() -> None:
        """robosuite's Controller.update: where the hand and the arm are, and how they answer to forces."""
        if not c.new_update:
            return
        sim.forward()
        c.ee_pos, c.ee_ori_mat = data.site_xpos[site].copy(), data.site_xmat[site].reshape(3, 3).copy()
        mujoco.mj_jacSite(model, data, jacobian_pos, jacobian_ori, site)
        c.ee_pos_vel, c.ee_ori_vel = np.dot(jacobian_pos, data.qvel), np.dot(jacobian_ori, data.qvel)
        c.joint_pos, c.joint_vel = data.qpos[joints], data.qvel[motions]
        c.J_pos, c.J_ori = jacobian_pos[:, motions], jacobian_ori[:, motions]
        c.J_full = np.concatenate([c.J_pos, c.J_ori])
        mujoco.mj_fullM(model, mass_matrix, data.qM)
        c.mass_matrix = mass_matrix[motions, :][:, motions]
        c.new_update = False

    def torques() -> np.ndarray:
        """Torques (7,) of operational space control, as in OperationalSpaceController.run_controller."""
        force = (c.goal_pos - c.ee_pos) * c.kp[:3] + -c.ee_pos_vel * c.kd[:3]
        torque = orientation_error(c.goal_ori, c.ee_ori_mat) * c.kp[3:6] + -c.ee_ori_vel * c.kd[3:6]
        _, lambda_pos, lambda_ori, nullspace = opspace_matrices(c.mass_matrix, c.J_full, c.J_pos, c.J_ori)
        wrench = np.concatenate([np.dot(lambda_pos, force), np.dot(lambda_ori, torque)])
        at_rest = nullspace_torques(c.mass_matrix, nullspace, c.initial_joint, c.joint_pos, c.joint_vel)
        return np.dot(c.J_full.T, wrench) + data.qfrc_bias[motions] + at_rest

    def control(action: np.ndarray, policy_step: bool = False) -> None:
        """Write the motor commands of one physics step; `action` (7,) is new when `policy_step` is true."""
        if policy_step:
            c.set_goal(action[:6])
        measure()
        c.new_update = True  # the next physics step measures anew
        data.ctrl[arm] = np.clip(torques(), arm_low, arm_high)
        data.ctrl[fingers] = fingers_middle + fingers_reach * gripper.format_action(action[6:])

    c.update = measure  # also for set_goal, which stays robosuite's
    return control
