"""One LIBERO task as an env that executes whole chunks of actions and renders only what the policy reads.

An episode: reset (seeded placement of fixtures; a stored initial state, or a fresh one that the seed places, too; 10
settling steps), then chunks until success or the step limit. `LiberoEnv` plays episodes; `Simulator`, beneath it, is
LIBERO's own env, driven one env step at a time.
"""

import atexit
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np

from contracts import BadInput, Observation
from envs import perturb, rendering, tasks
from envs.assets import find_pack
from envs.perturb import Perturbation
from envs.tasks import MAX_ENV_STEPS, TaskFiles, libero_root

log = logging.getLogger(__name__)
IMAGE_SIZE = 256
CAMERAS = ("agentview", "robot0_eye_in_hand")  # a policy with n images reads the first n
SETTLING_STEPS = 10  # initial states hold the objects some centimetres above the table
SUBSTEPS, FAST_SUBSTEPS = (
    25,
    13,
)  # physics steps of an env step: robosuite's, and in fast physics once all has settled
SETTLING_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # no motion, gripper open
MAX_PLACEMENT_TRIES = 100
ARM_NOISE_RAD = (
    0.02  # standard deviation of the arm's joints in the benchmark's initial states (robosuite's default)
)
# Objects of the benchmark's states settle by up to 17 cm, 6 cm sideways (off a plate's rim) and 30 degrees.
MAX_DROP_M = 0.25
MAX_SHIFT_M = 0.06
MAX_TILT_DEG = 30.0
MAX_SPEED = 0.05  # m/s, and 10 times it in rad/s
Poses = Mapping[
    str, tuple[np.ndarray, np.ndarray]
]  # of the objects: position (3,) in metres, rotation matrix (9,)
Seed = int | tuple[int, int]
Physics = Literal["exact", "fast"]  # LIBERO's to the bit, or `envs.fast`
Outcome = tuple[Mapping[str, np.ndarray], bool]  # of an env step: LIBERO's observations, success


class SimulatorFault(Exception):
    """The simulation went wrong by itself: not the policy's failure and not the user's."""


@dataclass(frozen=True)
class EnvSpec:
    """Recipe of the envs of a run; plain data that travels to worker processes."""

    task_suite: str  # a key of envs.tasks.MAX_ENV_STEPS, or METAWORLD
    task_ids: tuple[int, ...]
    num_images: int = 2  # 1: agentview; 2: agentview and wrist
    assets: str = "lowpoly"  # of LIBERO: "lowpoly", "official" or a folder
    bddl_file: str | None = None  # a task of one's own, as task id 0, with the step limit of task_suite
    max_env_steps: int | None = None  # None: the suite's
    kept_tasks: int = (
        3  # of different tasks, per slot of a pool: building one takes seconds, keeping it 0.2 to 0.6 GiB
    )

    def __post_init__(self) -> None:
        names = tasks.task_names(self.task_suite) if self.bddl_file is None else ("the BDDL file's",)
        if not self.task_ids or not all(0 <= task_id < len(names) for task_id in self.task_ids):
            listing = ", ".join(f"{task_id} {name}" for task_id, name in enumerate(names))
            found = ", ".join(map(str, self.task_ids)) or "none"
            raise BadInput(f"task ids are 0..{len(names) - 1}, found {found}; there are: {listing}")


@dataclass(frozen=True)
class ChunkResult:
    """Outcome of a reset (no action executed) or of a chunk."""

    observation: Observation | None  # None when the episode is over or nobody wanted one
    success: bool
    executed: int  # actions of this chunk that were executed
    env_steps: int  # env steps of the episode so far, settling not counted
    done: bool  # success, step limit or error
    error: str | None = None  # fault of the simulator: the episode is void, not a failure
    sim_s: float = 0.0
    render_s: float = 0.0
    frames: list[np.ndarray] = field(
        default_factory=list
    )  # agentview (256, 256, 3) of every env step when recording
    preprocess_s: float = 0.0


def task_files(spec: EnvSpec, task_id: int) -> TaskFiles:
    return (
        tasks.suite_task(spec.task_suite, task_id)
        if spec.bddl_file is None
        else tasks.bddl_task(spec.bddl_file)
    )


def run_part(env: Any, part: Callable[[], bool], observe: bool) -> ChunkResult:
    """Run a part of an episode of a LiberoEnv or MetaWorldEnv; `part` says whether it succeeded.

    A fault of the simulator ends the episode and costs the simulator its life.
    """
    started, steps_before = time.perf_counter(), env.env_steps
    env.frames, env.render_s = [], 0.0
    success, error, observation = False, None, None
    try:
        success = part()
        if observe and not success and env.env_steps < env.max_env_steps:
            observation = env.observation()
    except Exception as fault:  # whatever a simulator or a driver raises
        with suppress(Exception):  # what has failed may fail to close
            env.close()
        if isinstance(fault, BadInput):
            raise
        log.warning("simulator fault in %s, env step %d", env.name, env.env_steps, exc_info=fault)
        error = f"{type(fault).__name__}: {fault}"
    done = success or error is not None or env.env_steps >= env.max_env_steps
    env.running = not done
    executed, sim_s = env.env_steps - steps_before, time.perf_counter() - started - env.render_s
    return ChunkResult(
        observation, success, executed, env.env_steps, done, error, sim_s, env.render_s, env.frames
    )


def check_stability(data: Any) -> None:
    """Raises SimulatorFault: MuJoCo resets a state that has become NaN or huge, and only warns in its `MjData`."""
    import mujoco

    kinds = mujoco.mjtWarning
    for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC, kinds.mjWARN_BADCTRL):
        if data.warning[kind].number:
            raise SimulatorFault(f"the simulation became unstable ({kind.name})")


class LiberoEnv:
    """One task. The simulator behind it is built by the first reset, and again by the next one after a fault."""

    action_dim = 7

    def __init__(self, spec: EnvSpec, task_id: int) -> None:
        self.spec, self.task_id, self.files = spec, task_id, task_files(spec, task_id)
        self._init_states = tasks.load_init_states(self.files.init_states) if self.files.init_states else None
        self.name, self.instruction = self.files.name, self.files.instruction
        self.max_env_steps = spec.max_env_steps or MAX_ENV_STEPS[spec.task_suite]
        self.num_init_states = (
            tasks.NUM_SAMPLED_INIT_STATES if self._init_states is None else len(self._init_states)
        )
        self._cameras = CAMERAS[: spec.num_images]
        self._simulator: Simulator | None = None
        self.running, self.frames, self.render_s = False, list[np.ndarray](), 0.0

    def reset(
        self, init_state_id: int | None, seed: int = 0, record: bool = False, physics: Physics = "exact",
        perturbation: Perturbation | None = None, observe: bool = True,
    ) -> ChunkResult:  # fmt: skip
        """Start an episode, as a function of the arguments alone; render only if `observe`. Raises BadInput.

        With an initial state the seed places the fixtures; without one (None) everything: a fresh initial state.
        """
        self._perturbation, self.instruction = perturbation, self.files.instruction
        known = range(self.num_init_states)
        assert init_state_id is None or init_state_id in known, (
            f"initial state {init_state_id} of {len(known)}"
        )
        self.running, self._recording, self.env_steps = True, record, 0
        return run_part(self, lambda: self._start(init_state_id, seed, physics, observe), observe)

    def step_chunk(self, actions: np.ndarray, observe: bool = True) -> ChunkResult:
        """Execute `actions` (n, 7) one after the other, up to success or the step limit; then observe, or don't."""
        assert self.running, "no episode is running: reset first"
        actions = np.asarray(actions, dtype=np.float64)[: self.max_env_steps - self.env_steps]
        return run_part(self, lambda: self._execute(actions, observe), observe)

    @property
    def domain(self) -> Any:
        """LIBERO's own env beneath, with the true poses of all objects."""
        assert self._simulator is not None, "reset first"
        return self._simulator.domain

    def close(self) -> None:
        """Free the simulator. Also called at exit: GL contexts must go before GL itself does."""
        self.running = False
        if self._simulator is not None:
            simulator, self._simulator = self._simulator, None
            atexit.unregister(self.close)
            simulator.close()

    def _start(self, init_state_id: int | None, seed: int, physics: Physics, observe: bool) -> bool:
        if self._simulator is None:
            self._simulator = Simulator(self.files.bddl, find_pack(self.spec.assets).folder, self._cameras)
            atexit.register(self.close)
        simulator, change = self._simulator, self._perturbation
        stored = (
            None if init_state_id is None or self._init_states is None else self._init_states[init_state_id]
        )
        is_known = stored is not None and (
            change is None or change.kind != "position"
        )  # to be a start of an episode
        if (
            init_state_id is not None and stored is None
        ):  # of a task without stored states: a seed for every state
            seed = seed * self.num_init_states + init_state_id
        for draw in range(MAX_PLACEMENT_TRIES):
            simulator.reset((seed, draw) if stored is None else seed, stored, change, draw)
            if change is not None:
                self.instruction = perturb.change_scene(simulator.domain, change, self.files.instruction)
            placed = simulator.object_poses()
            if is_known:
                return self._settle(simulator, physics, observe)
            try:
                outcome = self._settle(simulator, physics, observe)
                problem = simulator.find_problem(placed)
            except SimulatorFault as fault:
                problem = str(fault)
            if problem is None or (stored is not None and draw == perturb.MAX_DRAWS):  # back where it was
                return outcome
            self.frames.clear()
        raise BadInput(
            f"{self.files.bddl}: none of {MAX_PLACEMENT_TRIES} placements can be used (the last: {problem})"
        )

    def _settle(self, simulator: "Simulator", physics: Physics, observe: bool) -> bool:
        for number in range(SETTLING_STEPS - 1):
            simulator.step(SETTLING_ACTION)
            if physics == "fast" and number == 0:  # the first goal is where the hand was before the reset
                simulator.hurry(SUBSTEPS)
        self._execute(SETTLING_ACTION[None], observe, count=0)
        if physics == "fast":
            simulator.hurry(FAST_SUBSTEPS)
        return False

    def _execute(self, actions: np.ndarray, observe: bool, count: int = 1) -> bool:
        assert self._simulator is not None, "an episode is running"
        self._simulator.gate.seconds = 0.0
        for number, action in enumerate(actions, start=1):
            self.env_steps += count
            is_seen = observe and number == len(actions) and self.env_steps < self.max_env_steps
            self._raw, success = self._simulator.step(
                action, self._cameras if is_seen else CAMERAS[: self._recording]
            )
            if self._recording:
                self.frames.append(upright(self._raw["agentview_image"]))
            if success:
                break
        self.render_s += self._simulator.gate.seconds
        return success

    def observation(self) -> Observation:
        """What the policy sees, by the conventions of the published OpenVLA-OFT evaluation."""
        raw = self._raw
        images = np.stack([upright(raw[f"{camera}_image"]) for camera in self._cameras])
        if self._perturbation is not None and self._perturbation.kind == "noise":
            images = perturb.noisy(images, self._perturbation, self.env_steps)
        hand, fingers = axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]
        proprio = np.concatenate([raw["robot0_eef_pos"], hand, fingers], dtype=np.float64)
        return Observation(images, proprio, self.instruction, state=self._state(raw["robot0_eef_pos"]))

    def _state(self, hand: np.ndarray) -> np.ndarray:
        """All joint positions, the robot's speeds, the hand, what lies how far from it, and the share of time gone."""
        simulator, data = self._simulator, self.domain.sim.data
        assert simulator is not None, "an episode is running"
        to_objects = [position - hand for position, _ in simulator.object_poses().values()]
        gone = self.env_steps / self.max_env_steps
        return np.concatenate([data.qpos, data.qvel[:9], hand, *to_objects, [gone]], dtype=np.float32)


def upright(image: np.ndarray) -> np.ndarray:
    """Turn one frame (256, 256, 3) by 180 degrees: LIBERO renders upside down, and the training data were turned."""
    return np.ascontiguousarray(image[::-1, ::-1])


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector (3,) of a quaternion (x, y, z, w); q and -q give different ones, as in the training data."""
    w = min(max(float(quaternion[3]), -1.0), 1.0)
    sin_half = math.sqrt(1.0 - w * w)
    if math.isclose(sin_half, 0.0):
        return np.zeros(3)
    return quaternion[:3] * 2.0 * math.acos(w) / sin_half


class Simulator:
    """One built task. Building takes seconds; a fault makes it worthless: close it and build another one."""

    def __init__(self, bddl: Path, assets: Path, cameras: Sequence[str]) -> None:
        rendering.prepare()
        with rendering.render_device():
            self._wrapper = _build_libero(bddl, assets, list(cameras))
        from envs import lean  # imports mujoco, which `prepare` has to precede

        self.domain = self._wrapper.env  # LIBERO's `BDDLBaseDomain`
        self.gate = lean.CameraGate(self.domain)
        lean.release_memory(self.domain)
        self._soft_reset = lean.soft_reset(self.domain)
        self._as_built, self._goal = perturb.snapshot(self.domain), self.domain.parsed_problem["goal_state"]
        self._lean_physics = lean.lean_physics
        self._step: Callable[[np.ndarray], Outcome] = self._exact_step
        self.domain.reward = lambda action: (
            0.0
        )  # LIBERO's costs a second check of success, which nobody reads

    def reset(
        self,
        seed: Seed,
        state: np.ndarray | None = None,
        perturbation: Perturbation | None = None,
        draw: int = 0,
    ) -> None:
        """Place everything by `seed`; then set the `state` (1 + nq + nv,): time, qpos, qvel, but of no fixture.

        Without one the objects stay where they were placed, and the arm's joints are drawn as in the benchmark's.
        """
        self._step = self._exact_step
        self.domain.sim.model.opt.timestep = self.domain.model_timestep
        self.gate.wanted = ()
        perturb.restore(self.domain, self._as_built, self._goal)
        _first_placement(self._soft_reset, seed)
        if state is None:
            state = self.domain.sim.get_state().flatten()
            state[1:8] += np.random.default_rng(seed).normal(0, ARM_NOISE_RAD, 7)
        size = 1 + self.domain.sim.model.nq + self.domain.sim.model.nv
        if len(state) != size:
            found = f"the initial states hold {len(state)} numbers each, this task {size}"
            raise BadInput(f"{found}: make those of your own task anew (python -m workshop.make_init_states)")
        if perturbation is not None and perturbation.magnitude > 0:
            state = perturb.displaced(state, self.domain, perturbation, draw)
        self._wrapper.set_init_state(state)

    def object_poses(self) -> Poses:
        data = self.domain.sim.data
        bodies = {name: self.domain.obj_body_id[name] for name in self.domain.objects_dict}
        return {
            name: (data.body_xpos[body].copy(), data.body_xmat[body].copy()) for name, body in bodies.items()
        }

    def find_problem(self, placed: Poses) -> str | None:
        """What speaks against objects that were `placed` and have settled since: no start of an episode."""
        domain = self.domain
        for name, (position, rotation) in self.object_poses().items():
            x, y, z = position - placed[name][0]
            if z < -MAX_DROP_M:
                return f"{name} falls"
            if math.hypot(x, y) > MAX_SHIFT_M:
                return f"{name} is pushed away"
            cosine = (placed[name][1] @ rotation - 1) / 2  # of the angle between them: trace(A^T B) = a . b
            if math.degrees(math.acos(np.clip(cosine, -1, 1))) > MAX_TILT_DEG:
                return f"{name} tips over"
            velocity = np.abs(
                domain.sim.data.get_joint_qvel(domain.objects_dict[name].joints[-1])
            )  # (6,): m/s, rad/s
            if velocity[:3].max() > MAX_SPEED or velocity[3:].max() > 10 * MAX_SPEED:
                return f"{name} does not come to rest"
        return "already solved" if domain._check_success() else None

    def step(self, action: np.ndarray, wanted: Sequence[str] = ()) -> Outcome:
        """One env step (25 physics steps); renders the `wanted` cameras. Returns LIBERO's observations, success."""
        self.gate.wanted = tuple(wanted)
        raw, success = self._step(action)
        check_stability(self.domain.sim.data._data)
        return raw, success

    def hurry(self, substeps: int) -> None:
        """Step by `envs.fast` up to the next reset."""
        from envs.fast import fast_step

        self._step = fast_step(self.domain, substeps)

    def _exact_step(self, action: np.ndarray) -> Outcome:
        with self._lean_physics(self.domain.sim):
            raw, _, success, _ = self.domain.step(action)
        return raw, bool(success)

    def close(self) -> None:
        """Free the GL context while its display still exists, else the interpreter's exit is full of EGLError."""
        self.gate.make_gl_current()
        self._wrapper.close()


def _first_placement(attempt: Callable[[], Any], seed: Seed) -> Any:
    """Repeat `attempt` until LIBERO's sampler finds room for all objects, as LIBERO's own reset does."""
    from robosuite.utils.errors import RandomizationError

    state = np.random.get_state()  # noqa: NPY002 - LIBERO draws from the global generator, which others use, too
    np.random.seed(seed)  # noqa: NPY002
    try:
        for _ in range(MAX_PLACEMENT_TRIES):
            with suppress(RandomizationError):
                return attempt()
    finally:
        np.random.set_state(state)  # noqa: NPY002
    raise SimulatorFault(f"LIBERO found no placement of the objects in {MAX_PLACEMENT_TRIES} tries")


def _build_libero(bddl: Path, assets: Path, cameras: list[str]) -> Any:
    import libero.libero
    import mujoco
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv

    from envs import lean

    # Without a handler MuJoCo writes its warnings into MUJOCO_LOG.TXT in the current folder.
    mujoco.set_mju_user_warning(lambda message: log.warning("mujoco: %s", message))
    libero.libero._assets_path_cache = str(assets)  # hf-libero ignores its config file here
    is_own = not bddl.is_relative_to(libero_root())
    frame = {"camera_names": cameras, "camera_heights": IMAGE_SIZE, "camera_widths": IMAGE_SIZE}
    try:
        with patch.object(lean.MjSim, "from_xml_string", lean.load_lean):
            # It is never `done`: the step limit is the episode's.
            wrapper = _first_placement(
                lambda: OffScreenRenderEnv(
                    bddl_file_name=str(bddl), hard_reset=False, ignore_done=True, **frame
                ),
                seed=0,
            )
        if is_own:
            wrapper.env._check_success()  # a goal that LIBERO cannot evaluate would end every episode in an error
        return wrapper
    except Exception as fault:  # files that are missing, or a mistake in the task that envs.bddl cannot see
        if not is_own and not isinstance(fault, OSError | ValueError):
            raise
        found = f"LIBERO cannot build {bddl} with the assets of {assets} ({type(fault).__name__}: {fault})"
        raise BadInput(f"{found}; compare its categories and regions with those of LIBERO's files") from fault
