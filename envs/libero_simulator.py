"""Build LIBERO's own env of one task, and reset and step it one env step at a time.

`envs.libero.LiberoEnv` plays whole episodes with it.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from unittest.mock import patch

import numpy as np

from contracts import BadInput
from envs import libero_pro
from envs.env import IMAGE_SIZE, SimulatorFault
from envs.gl_backend import render_device
from envs.libero_imports import prepare_imports
from envs.tasks import libero_root

if TYPE_CHECKING:
    from libero.libero.envs.bddl_base_domain import BDDLBaseDomain
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv

log = logging.getLogger(__name__)
T = TypeVar("T")
SETTLING_STEPS = 10  # env steps: initial states hold the objects some centimetres above the table
SETTLING_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # no motion, gripper open
MAX_PLACEMENT_TRIES = 100  # of a reset, 0.1 s each
MAX_BUILD_TRIES = 10  # seconds each
# Standard deviation of the arm's joints in the benchmark's initial states: robosuite's default.
ARM_NOISE_RAD = 0.02
# While the benchmark's own states settle, objects fall by up to 17 cm, slide by up to 6 cm (off a plate's rim) and tilt
# by up to 30 degrees.
MAX_DROP_M = 0.25
MAX_SHIFT_M = 0.06
MAX_TILT_DEG = 30.0
MAX_SPEED = 0.05  # m/s; for rotation the limit is 10 times this number, in rad/s

Pose = tuple[np.ndarray, np.ndarray]  # an object's position (3,) in metres, and its rotation matrix (9,)
Seed = int | tuple[int, ...]
StepOutcome = tuple[Mapping[str, np.ndarray], bool]  # LIBERO's observations after an env step, success
# Fields of the model that cameras of LIBERO-Plus and fast physics change; every reset restores them.
CHANGED_FIELDS = ("cam_pos", "cam_quat", "geom_solref")


class Placement(NamedTuple):
    """Where everything stands before it settles."""

    seed: Seed  # places the fixtures, which are not part of a state
    state: np.ndarray  # (1 + nq + nv,): time, qpos and qvel


class LiberoSimulator:
    """One built task. Building takes seconds.

    After an unstable simulation (SimulatorFault) a reset is enough. After any other exception close it and build
    another one.
    """

    def __init__(self, bddl: Path, assets: Path, cameras: Sequence[str]) -> None:
        prepare_imports()
        with render_device():
            self._wrapper = _build_wrapper(bddl, assets, list(cameras))
        from envs import lean  # only now, because it imports mujoco, and `prepare_imports` has to come first

        self.domain: BDDLBaseDomain = self._wrapper.env
        self.gate = lean.CameraGate(self.domain)
        lean.release_memory(self.domain)
        lean.prepare_soft_reset(self.domain)
        self._soft_reset = partial(lean.soft_reset, self.domain)
        self._lean_physics = lean.lean_physics
        self._model = self.domain.sim.model._model
        self._model_as_built = {name: getattr(self._model, name).copy() for name in CHANGED_FIELDS}
        self._step: Callable[[np.ndarray], StepOutcome] = self._exact_step
        # Nobody reads LIBERO's reward, and computing it would check success a second time.
        self.domain.reward = lambda action: 0.0

    def reset(
        self, seed: Seed, state: np.ndarray | None = None, arm_offset: np.ndarray | float = 0.0
    ) -> Placement:
        """Place everything by `seed`, then set `state` (1 + nq + nv,): time, qpos and qvel. Returns both.

        Fixtures are not part of a state, so the seed always places them. Without a state the objects, too, stay where
        the seed placed them, and the arm's joints are drawn as in the benchmark's states. With `arm_offset` (7,) in rad
        the arm stands elsewhere when its controller is made; then the state puts it back, and the controller pulls it
        to where it was made. Raises BadInput for a state of another task, and SimulatorFault if LIBERO finds no room
        for its objects.
        """
        self._step = self._exact_step
        self.domain.sim.model.opt.timestep = self.domain.model_timestep
        self.gate.cameras = ()
        for name, values in self._model_as_built.items():
            getattr(self._model, name)[:] = values
        robot = self.domain.robots[0]
        liberos_joints = robot.init_qpos
        robot.init_qpos = liberos_joints + arm_offset
        _repeat_until_placed(self._soft_reset, seed, MAX_PLACEMENT_TRIES)
        robot.init_qpos = liberos_joints
        if state is None:
            state = self.domain.sim.get_state().flatten()
            state[1:8] += np.random.default_rng(seed).normal(0, ARM_NOISE_RAD, 7)
        expected = 1 + self.domain.sim.model.nq + self.domain.sim.model.nv
        if len(state) != expected:
            raise BadInput(
                f"an initial state has {len(state)} numbers, this task needs {expected}: "
                "remove the file of states, which is another task's"
            )
        self._wrapper.set_init_state(state)
        return Placement(seed, state)

    def step(self, action: np.ndarray, cameras: Sequence[str] = ()) -> StepOutcome:
        """Make one env step; returns LIBERO's observations and success. Raises SimulatorFault.

        Only `cameras` render; the images of all other cameras are black.
        """
        self.gate.cameras = tuple(cameras)
        observations, success = self._step(action)
        self._check_stability()
        return observations, success

    def _check_stability(self) -> None:
        """Raise SimulatorFault if the simulation is unstable: MuJoCo resets a huge state, and only counts a warning."""
        import mujoco

        warnings = self.domain.sim.data._data.warning
        kinds = mujoco.mjtWarning
        for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC, kinds.mjWARN_BADCTRL):
            if warnings[kind].number:
                raise SimulatorFault(f"the simulation became unstable ({kind.name})")

    def settle(self, env_steps: int = SETTLING_STEPS) -> None:
        """Hold still while the objects come to rest. Raises SimulatorFault."""
        for _ in range(env_steps):
            self.step(SETTLING_ACTION)

    def use_fast_physics(self, physics_steps: int) -> None:
        """Until the next reset use `envs.fast_physics`, with `physics_steps` physics steps in an env step."""
        from envs.fast_physics import FastStep

        self._step = FastStep(self.domain, physics_steps)

    def object_poses(self) -> dict[str, Pose]:
        """The present poses of the movable objects, by name."""
        data = self.domain.sim.data
        poses = {}
        for name in self.domain.objects_dict:
            body = self.domain.obj_body_id[name]
            poses[name] = (data.body_xpos[body].copy(), data.body_xmat[body].copy())
        return poses

    def find_problem(self, placed: Mapping[str, Pose]) -> str | None:
        """Why the settled scene cannot start an episode, or None; `placed` holds the poses before settling."""
        for name, pose in self.object_poses().items():
            problem = _find_move(placed[name], pose) or self._find_motion(name)
            if problem is not None:
                return f"{name} {problem}"
        return "already solved" if self.domain._check_success() else None

    def _find_motion(self, name: str) -> str | None:
        joint = self.domain.objects_dict[name].joints[-1]
        velocity = np.abs(self.domain.sim.data.get_joint_qvel(joint))  # (6,): m/s, rad/s
        if velocity[:3].max() > MAX_SPEED or velocity[3:].max() > 10 * MAX_SPEED:
            return "does not come to rest"
        return None

    def _exact_step(self, action: np.ndarray) -> StepOutcome:
        with self._lean_physics(self.domain.sim):
            observations, _, success, _ = self.domain.step(action)
        return observations, bool(success)

    def close(self) -> None:
        """Free the GL context. Call this while the EGL display exists, else the interpreter's exit prints EGLError."""
        self.gate.make_gl_current()
        self._wrapper.close()


def _find_move(placed: Pose, settled: Pose) -> str | None:
    """How an object left its place while it settled, or None if it moved no further than the benchmark's objects."""
    x, y, z = settled[0] - placed[0]
    if z < -MAX_DROP_M:
        return "falls"
    if math.hypot(x, y) > MAX_SHIFT_M:
        return "is pushed away"
    # The angle between two rotations: trace(A^T B) = 1 + 2 cos(angle), and the trace is the product of all elements.
    cosine = (placed[1] @ settled[1] - 1) / 2
    if math.degrees(math.acos(np.clip(cosine, -1, 1))) > MAX_TILT_DEG:
        return "tips over"
    return None


def _repeat_until_placed(attempt: Callable[[], T], seed: Seed, max_tries: int) -> T:
    """Repeat `attempt` until LIBERO's sampler finds room for all objects, as LIBERO's own reset does.

    Random numbers are drawn from `seed`. Raises SimulatorFault after `max_tries` attempts.
    """
    from robosuite.utils.errors import RandomizationError

    # LIBERO draws from NumPy's global generator. Restore its state afterwards, because other code uses it, too.
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        for _ in range(max_tries):
            with suppress(RandomizationError):
                return attempt()
            # A half-built env frees its GL objects now, while its context is current; later it would free another's.
            gc.collect()
    finally:
        np.random.set_state(state)  # noqa: NPY002
    raise SimulatorFault(f"LIBERO found no room for the objects in {max_tries} tries")


def _build_wrapper(bddl: Path, assets: Path, cameras: list[str]) -> OffScreenRenderEnv:
    """Build LIBERO's OffScreenRenderEnv of a task file. Raises BadInput if the task or the assets are wrong."""
    import libero.libero.envs.env_wrapper
    import mujoco

    # Otherwise MuJoCo writes its warnings to MUJOCO_LOG.TXT in the current folder.
    mujoco.set_mju_user_warning(partial(log.warning, "mujoco: %s"))
    libero_pro.register_categories()
    libero.libero._assets_path_cache = str(assets)  # hf-libero ignores its config file here

    is_users_task = not bddl.is_relative_to(libero_root())
    wrapper = None
    try:
        wrapper = _repeat_until_placed(partial(_new_wrapper, bddl, assets, cameras), 0, MAX_BUILD_TRIES)
        if is_users_task:
            _check_places(wrapper.env)
            # Try the goal now: if LIBERO could not evaluate it, every episode would end in an error.
            wrapper.env._check_success()
        return wrapper
    except Exception as fault:  # missing files, or a mistake in the task that envs.bddl cannot see
        if wrapper is not None:
            wrapper.close()
        if not is_users_task and not isinstance(fault, OSError | ValueError):
            raise
        advice = (
            "compare its categories and regions with those of LIBERO's files"
            if is_users_task and not isinstance(fault, OSError)
            else "these assets may lack what the task needs: use --assets official"
        )
        raise BadInput(
            f"LIBERO cannot build {bddl} with the assets of {assets} ({type(fault).__name__}: {fault}); {advice}"
        ) from fault


def _check_places(domain: BDDLBaseDomain) -> None:
    """Raise ValueError if (:init ...) of a task file names what does not exist, or places an object or fixture nowhere.

    LIBERO ignores such lines, and leaves what has no place in the world's origin, below the table.
    """
    init = domain.parsed_problem["initial_state"]
    regions = domain.parsed_problem["regions"]
    places = {"on": {*regions, *domain.objects_dict}, "in": {*regions}}
    placed = {line[1] for line in init if len(line) == 3 and line[2] in places.get(line[0], ())}
    for name in (*domain.objects_dict, *domain.fixtures_dict):
        if name not in placed:
            raise ValueError(f"(:init ...) puts {name} into no region that exists")
    for predicate, *names in init:
        if len(names) == 1 and names[0] not in domain.object_states_dict:
            raise ValueError(f"(:init ...) has {predicate} for {names[0]}, which does not exist")


def _new_wrapper(bddl: Path, assets: Path, cameras: list[str]) -> OffScreenRenderEnv:
    """LIBERO's env of a task file. Raises RandomizationError if LIBERO's sampler finds no room for an object."""
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv

    from envs import lean

    with patch.object(lean.MjSim, "from_xml_string", partial(lean.load_lean, pack=assets)):
        return OffScreenRenderEnv(
            bddl_file_name=str(bddl),
            camera_names=cameras,
            camera_heights=IMAGE_SIZE,
            camera_widths=IMAGE_SIZE,
            hard_reset=False,
            ignore_done=True,  # `LiberoEnv` applies the step limit, not LIBERO
        )
