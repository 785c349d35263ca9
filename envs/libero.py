"""One LIBERO task as an env (`envs.env.Env`) that executes whole chunks of actions and renders only what is read.

An episode begins with a reset: the seed places the fixtures; the objects get a stored initial state, or the seed places
them, too; then there are 10 settling steps. Chunks of actions follow until success or the step limit. Each env step is
done by `envs.libero_simulator`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from contracts import BadInput, Observation
from envs import libero_plus, libero_pro, perturb, plus_noise, tasks
from envs.assets import find_pack
from envs.chunk_run import ChunkRun
from envs.closing import close_at_exit, forget
from envs.env import ChunkResult, EnvSpec, Physics, SimulatorFault
from envs.libero_plus import Variant
from envs.libero_simulator import MAX_PLACEMENT_TRIES, SETTLING_ACTION, SETTLING_STEPS, LiberoSimulator
from envs.perturb import Perturbation
from envs.rendering import upright
from envs.tasks import MAX_ENV_STEPS, PRO_CHANGES, TaskFiles, split_suite

if TYPE_CHECKING:
    from libero.libero.envs.bddl_base_domain import BDDLBaseDomain

CAMERAS = ("agentview", "robot0_eye_in_hand")  # a policy with n images uses the first n
EXACT_SUBSTEPS = 25  # physics steps of an env step in robosuite
FAST_SUBSTEPS = 13  # physics steps of an env step in fast physics, after the objects have settled


def task_files(spec: EnvSpec, task_id: int) -> TaskFiles:
    """The files of a task: the user's BDDL file if `spec` names one, else a task of the suite. Raises BadInput."""
    if spec.bddl_file is not None:
        return tasks.bddl_task(spec.bddl_file)
    _, change = split_suite(spec.task_suite)
    if change in PRO_CHANGES:
        return libero_pro.pro_task(spec.task_suite, task_id)
    return tasks.suite_task(spec.task_suite, task_id)


class LiberoEnv:
    """One task of LIBERO. The first reset builds the simulator. After a fault the next reset builds it again."""

    action_dim = 7

    def __init__(self, spec: EnvSpec, task_id: int) -> None:
        self.spec = spec
        self.task_id = task_id
        self.files = task_files(spec, task_id)
        self.name = self.files.name
        self.instruction = self.files.instruction
        base_suite, _ = split_suite(spec.task_suite)
        self.max_env_steps = spec.max_env_steps or MAX_ENV_STEPS[base_suite]
        self._init_states: np.ndarray | None = None
        self.num_init_states = tasks.NUM_SAMPLED_INIT_STATES
        if self.files.init_states is not None:
            self._init_states = tasks.load_init_states(self.files.init_states)
            self.num_init_states = len(self._init_states)
        self._variants: tuple[Variant, ...] = ()
        if spec.bddl_file is None:
            self._variants = libero_plus.find_variants(spec.task_suite, task_id)
        if self._variants:  # they are numbered like initial states, and all start from the task's first one
            self.num_init_states = len(self._variants)
        self._variant: Variant | None = None
        self.env_steps = 0
        self._cameras = CAMERAS[: spec.num_images]
        self._simulator: LiberoSimulator | None = None
        self._recording = False
        self._perturbation: Perturbation | None = None
        self._seed = 0  # of the running episode

    def reset(
        self,
        init_state_id: int | None,
        seed: int = 0,
        record: bool = False,
        physics: Physics = "exact",
        perturbation: Perturbation | None = None,
        observe: bool = True,
    ) -> ChunkResult:
        """Start an episode that depends on the arguments only; render only if `observe`. Raises BadInput.

        With an `init_state_id` the seed places only the fixtures. With None it places everything. In a suite of
        LIBERO-Plus `init_state_id` is the number of a variant; None starts the task that the variants change.
        """
        assert init_state_id is None or 0 <= init_state_id < self.num_init_states, f"{init_state_id=}"
        self.env_steps = 0
        self._recording = record
        self._perturbation = perturbation
        self._seed = seed
        self._variant = None
        if self._variants and init_state_id is not None:
            self._variant = self._variants[init_state_id]
            init_state_id = 0
        self._run = ChunkRun(self)
        with self._run as run:
            self._start(init_state_id, seed, physics, observe)
            if observe and not run.is_over:
                run.observation = self.observation()
        return run.result()

    def step_chunk(self, actions: np.ndarray, observe: bool = True) -> ChunkResult:
        """Execute `actions` (n, 7) one by one, up to success or the step limit; render only if `observe`."""
        assert self._simulator is not None, "reset first"
        actions = np.asarray(actions, dtype=np.float64)[: self.max_env_steps - self.env_steps]
        self._run = ChunkRun(self)
        with self._run as run:
            run.success = self._execute(actions, observe)
            if observe and not run.is_over:
                run.observation = self.observation()
        return run.result()

    @property
    def domain(self) -> BDDLBaseDomain:
        """LIBERO's own env, which knows the true poses of all objects."""
        return self._built().domain

    def close(self) -> None:
        """Free the simulator. It is also freed at the end of the program."""
        if self._simulator is not None:
            simulator = self._simulator
            self._simulator = None
            forget(self.close)
            simulator.close()

    def _built(self) -> LiberoSimulator:
        assert self._simulator is not None, "reset first"
        return self._simulator

    # ------------------------------------------------------------------------------------------------- the start

    def _start(self, init_state_id: int | None, seed: int, physics: Physics, observe: bool) -> None:
        """Place the scene and let it settle, again and again until it can start an episode. Raises BadInput."""
        if self._simulator is None:
            assets = find_pack(self.spec.assets).folder
            self._simulator = LiberoSimulator(self.files.bddl, assets, self._cameras)
            close_at_exit(self.close)
        state = None
        if init_state_id is not None:
            if self._init_states is not None:
                state = self._init_states[init_state_id]
            else:  # the task has no stored states: each init_state_id has a seed of its own
                seed = seed * self.num_init_states + init_state_id
        problem: str | None = None
        for draw in range(MAX_PLACEMENT_TRIES):
            self._place(state, seed, draw)
            if self._is_own_placement(state, draw):
                self._settle(physics, observe)
                return
            problem = self._settle_and_find_problem(physics, observe)
            if problem is None:
                return
            self._run.frames.clear()
        raise BadInput(
            f"{self.files.bddl}: none of {MAX_PLACEMENT_TRIES} placements can be used (the last: {problem})"
        )

    def _place(self, state: np.ndarray | None, seed: int, draw: int) -> None:
        """Reset the simulator to where the episode starts, and perturb it.

        state: (1 + nq + nv,), or None: then every `draw` gives another placement.
        """
        simulator = self._built()
        placement_seed = (seed, draw) if state is None else seed
        arm_offset = libero_plus.arm_offset(self._variant.arm if self._variant is not None else 0)
        simulator.reset(placement_seed, state, self._perturbation, draw, arm_offset)
        self.instruction = self.files.instruction
        if self._variant is not None:
            libero_plus.move_camera(simulator.domain, self._variant.view)
            self.instruction = self._variant.instruction(self.spec.leaked_prompt)
        if self._perturbation is not None:
            self.instruction = perturb.change_scene(simulator.domain, self._perturbation, self.instruction)

    def _is_own_placement(self, state: np.ndarray | None, draw: int) -> bool:
        """Whether the objects stand where the stored state puts them. Such a start is used without a check."""
        if state is None:
            return False
        moves_objects = self._perturbation is not None and self._perturbation.kind == "position"
        return not moves_objects or draw == perturb.MAX_DRAWS  # the last draw moves nothing

    def _settle_and_find_problem(self, physics: Physics, observe: bool) -> str | None:
        """Let the objects settle; returns the reason why the episode cannot start from here, or None."""
        placed = self._built().object_poses()
        try:
            self._settle(physics, observe)
        except SimulatorFault as fault:
            return str(fault)
        return self._built().find_problem(placed)

    def _settle(self, physics: Physics, observe: bool) -> None:
        """Hold still for 10 env steps; the policy's first observation is that of the last one."""
        simulator = self._built()
        simulator.settle(1)
        # Not before the first step, because its goal is where the hand was before the reset.
        if physics == "fast":
            simulator.use_fast_physics(EXACT_SUBSTEPS)
        simulator.settle(SETTLING_STEPS - 2)
        self._step(SETTLING_ACTION, observe)
        if physics == "fast":
            simulator.use_fast_physics(FAST_SUBSTEPS)

    # ------------------------------------------------------------------------------------------ steps and sights

    def _execute(self, actions: np.ndarray, observe: bool) -> bool:
        """Execute actions up to success; returns whether the task was solved."""
        for index, action in enumerate(actions):
            self.env_steps += 1
            is_last = index == len(actions) - 1
            is_observed = observe and is_last and self.env_steps < self.max_env_steps
            if self._step(action, is_observed):
                return True
        return False

    def _step(self, action: np.ndarray, is_observed: bool) -> bool:
        """Make one env step; returns whether the task is solved.

        The policy's cameras render if `is_observed`, else agentview if a video is recorded, else none.
        """
        simulator = self._built()
        recorded = CAMERAS[:1] if self._recording else ()
        cameras = self._cameras if is_observed else recorded
        simulator.gate.seconds = 0.0
        self._raw, success = simulator.step(action, cameras)
        self._run.render_s += simulator.gate.seconds
        if self._recording:
            self._run.frames.append(upright(self._raw["agentview_image"]))
        return success

    def observation(self) -> Observation:
        """What the policy sees, in the conventions of the published OpenVLA-OFT evaluation.

        Images (num_images, 256, 256, 3), upright; proprio (8,): hand position (m), axis-angle (rad), finger joints (m).
        """
        raw = self._raw
        frames = {camera: raw[f"{camera}_image"] for camera in self._cameras}
        if self._variant is not None and self._variant.noise:
            rng = np.random.default_rng([self._seed, self._variant.noise, self.env_steps])
            frames["agentview"] = plus_noise.noisy(frames["agentview"], self._variant.noise, rng)
        # LIBERO renders upside down; the images of the training data were turned, too.
        images = np.stack([upright(frame) for frame in frames.values()])
        if self._perturbation is not None and self._perturbation.kind == "noise":
            images = perturb.noisy(images, self._perturbation, self.env_steps)
        hand = raw["robot0_eef_pos"]
        rotation = axis_angle(raw["robot0_eef_quat"])
        proprio = np.concatenate([hand, rotation, raw["robot0_gripper_qpos"]], dtype=np.float64)
        return Observation(images, proprio, self.instruction, state=self._true_state(hand))

    def _true_state(self, hand: np.ndarray) -> np.ndarray:
        """The simulation's state for critics, (D,) float32.

        Joint positions, the robot's joint velocities (9,), the hand's position (3,), the vectors from the hand to every
        object (3 each), and the share of the step limit that has been used.
        """
        data = self.domain.sim.data
        to_objects = [position - hand for position, _ in self._built().object_poses().values()]
        share_used = self.env_steps / self.max_env_steps
        return np.concatenate([data.qpos, data.qvel[:9], hand, *to_objects, [share_used]], dtype=np.float32)


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector (3,) in rad of a quaternion (x, y, z, w).

    q and -q are the same rotation but give different vectors, as in the training data.
    """
    w = min(max(float(quaternion[3]), -1.0), 1.0)
    sin_half = math.sqrt(1.0 - w * w)
    if math.isclose(sin_half, 0.0):
        return np.zeros(3)
    return quaternion[:3] * 2.0 * math.acos(w) / sin_half
