"""One LIBERO task as an env (`envs.env.Env`) that executes whole chunks of actions and renders only what is read.

An episode begins with a reset: the seed places the fixtures; the objects get a stored initial state, or the seed places
them, too; then there are 10 settling steps. Chunks of actions follow until success or the step limit. Each env step is
done by `envs.libero_simulator`.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from contracts import BadInput, Observation
from envs import libero_plus, libero_pro, tasks
from envs.assets import find_pack
from envs.env import ChunkResult, EnvSpec, SimulatorFault, Start, chunk_result
from envs.libero_plus import Variant
from envs.libero_simulator import (
    MAX_PLACEMENT_TRIES,
    SETTLING_ACTION,
    SETTLING_STEPS,
    LiberoSimulator,
    Placement,
    Seed,
)
from envs.tasks import MAX_ENV_STEPS, PRO_CHANGES, TaskFiles, split_suite

if TYPE_CHECKING:
    from libero.libero.envs.bddl_base_domain import BDDLBaseDomain

# The last number of a numbered placement's seed, so that it is none of the fresh placements.
NUMBERED = 1
CAMERAS = ("agentview", "robot0_eye_in_hand")  # a policy with n images uses the first n
# Physics steps of an env step in fast physics.
SETTLING_SUBSTEPS = 25  # while objects settle: as many as in exact physics
FAST_SUBSTEPS = 13  # afterwards


def task_files(spec: EnvSpec, task_id: int) -> TaskFiles:
    """The files of a task: the user's BDDL file if `spec` names one, else a task of the suite. Raises BadInput."""
    if spec.bddl_file is not None:
        if task_id != 0:
            raise BadInput(f"--bddl-file is one task, whose id is 0, found {task_id}")
        return tasks.bddl_task(spec.bddl_file)
    _, change = split_suite(spec.task_suite)
    if change in PRO_CHANGES:
        return libero_pro.pro_task(spec.task_suite, task_id)
    return tasks.suite_task(spec.task_suite, task_id)


def _numbered_starts(
    files: TaskFiles, variants: Sequence[Variant]
) -> list[tuple[np.ndarray | None, Variant | None]]:
    """The stored state of each numbered start, None if the seed places everything, and its variant, if any."""
    if files.init_states is None:
        return [(None, None)] * tasks.NUM_SAMPLED_INIT_STATES
    states = tasks.load_init_states(files.init_states)
    if variants:  # all start from the task's first initial state
        return [(states[0], variant) for variant in variants]
    return [(state, None) for state in states]


@dataclass
class _Episode:
    """Where the running episode started, and what it has come to."""

    start: Start
    stored_state: np.ndarray | None = None  # (1 + nq + nv,); None: the seed places everything
    variant: Variant | None = None  # of LIBERO-Plus
    requested_placement: Placement | None = None  # by the caller, in place of the start's
    raw: Mapping[str, np.ndarray] = field(default_factory=dict)  # LIBERO's observations, the last ones


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
        variants = libero_plus.find_variants(spec.task_suite, task_id) if spec.bddl_file is None else ()
        self._numbered_starts = _numbered_starts(self.files, variants)
        self.num_init_states = len(self._numbered_starts)
        self.env_steps = 0
        self._cameras = CAMERAS[: spec.num_images]
        self._simulator: LiberoSimulator | None = None
        self._episode = _Episode(Start(None))
        self.placement: Placement | None = None  # where everything stood before the running episode

    def reset(self, start: Start, observe: bool = True, placement: Placement | None = None) -> ChunkResult:
        """Start an episode that depends on `start` only; render only if `observe`. Raises BadInput.

        With an `init_state_id` the seed places only the fixtures, unless the task has no stored states: then number and
        seed together place everything. With None the seed places everything, never as for a number. In a suite of
        LIBERO-Plus `init_state_id` is the number of a variant; None starts the task that the variants change.

        With a `placement` everything stands there instead; if an object does not stay where it was placed, the result's
        `error` says so.
        """
        index = start.init_state_id
        assert index is None or 0 <= index < self.num_init_states, f"{start=}"
        stored_state, variant = (None, None) if index is None else self._numbered_starts[index]
        self._episode = _Episode(start, stored_state, variant, placement)
        self.instruction = self.files.instruction
        if variant is not None:
            self.instruction = variant.instruction(self.spec.leaked_prompt)
        self.env_steps = 0
        with chunk_result(self) as result:
            if placement is None:
                self._find_start(result, observe)
            else:
                result.error = self._try_start(result, observe)
            if observe and result.error is None:
                result.observation = self.observation()
        return result

    def step_chunk(self, actions: np.ndarray, observe: bool = True) -> ChunkResult:
        """Execute `actions` (n, 7) one by one, up to success or the step limit; render only if `observe`."""
        assert self._simulator is not None, "reset first"
        actions = np.asarray(actions, dtype=np.float64)[: self.max_env_steps - self.env_steps]
        with chunk_result(self) as result:
            result.success = self._execute(actions, result, observe)
            if observe and not result.success and self.env_steps < self.max_env_steps:
                result.observation = self.observation()
        return result

    @property
    def domain(self) -> BDDLBaseDomain:
        """LIBERO's own env, which knows the true poses of all objects."""
        return self._built().domain

    def close(self) -> None:
        """Free the simulator. It is also freed at the end of the program."""
        if self._simulator is not None:
            simulator = self._simulator
            self._simulator = None
            atexit.unregister(self.close)
            simulator.close()

    def _built(self) -> LiberoSimulator:
        """The simulator, built now if it is not there."""
        if self._simulator is None:
            assets = find_pack(self.spec.assets).folder
            self._simulator = LiberoSimulator(self.files.bddl, assets, self._cameras)
            # Registered after the GL display, so called before its end: closing later would print EGLError.
            atexit.register(self.close)
        return self._simulator

    # ------------------------------------------------------------------------------------------------- the start

    def _find_start(self, result: ChunkResult, observe: bool) -> None:
        """Try placements until an episode can start. Raises BadInput if none of MAX_PLACEMENT_TRIES will do."""
        for attempt in range(MAX_PLACEMENT_TRIES):
            problem = self._try_start(result, observe, attempt)
            if problem is None:
                return
            result.frames.clear()
        raise BadInput(
            f"{self.files.bddl}: none of {MAX_PLACEMENT_TRIES} placements can be used (the last: {problem})"
        )

    def _try_start(self, result: ChunkResult, observe: bool, attempt: int = 0) -> str | None:
        """Place everything and let it settle. Returns why no episode can start from there, or None if one can."""
        self._place(attempt)
        episode = self._episode
        if episode.stored_state is not None and episode.requested_placement is None:
            self._settle(result, observe)  # the benchmark's own states are used without a check
            return None
        placed = self._built().object_poses()
        try:
            self._settle(result, observe)
        except SimulatorFault as fault:
            return str(fault)
        return self._built().find_problem(placed)

    def _place(self, attempt: int) -> None:
        """Put everything where the episode starts. Without a stored state each `attempt` draws other places."""
        simulator = self._built()
        episode = self._episode
        variant = episode.variant
        arm_offset = 0.0 if variant is None else libero_plus.arm_offset(variant.arm)
        seeded = (self._placement_seed(attempt), episode.stored_state)
        seed, state = episode.requested_placement or seeded
        self.placement = simulator.reset(seed, state, arm_offset)
        if variant is not None:
            libero_plus.move_camera(simulator.domain, variant.view)

    def _placement_seed(self, attempt: int) -> Seed:
        """The seed of an attempt. Fresh and numbered placements have seeds of their own, so none is the same."""
        start = self._episode.start
        if self._episode.stored_state is not None:
            return start.seed
        if start.init_state_id is None:
            return (start.seed, attempt)
        return (start.seed * self.num_init_states + start.init_state_id, attempt, NUMBERED)

    def _settle(self, result: ChunkResult, observe: bool) -> None:
        """Hold still for SETTLING_STEPS env steps; the policy's first observation is that of the last one."""
        simulator = self._built()
        is_fast = self._episode.start.physics == "fast"
        # The first step is exact: in it the controller's goal is still where the hand was before the reset.
        simulator.settle(1)
        if is_fast:
            simulator.use_fast_physics(SETTLING_SUBSTEPS)
        simulator.settle(SETTLING_STEPS - 2)  # all but the first and the last
        self._step(SETTLING_ACTION, result, observe)
        if is_fast:
            simulator.use_fast_physics(FAST_SUBSTEPS)

    # ------------------------------------------------------------------------------------------ steps and sights

    def _execute(self, actions: np.ndarray, result: ChunkResult, observe: bool) -> bool:
        """Execute actions up to success; returns whether the task was solved."""
        for index, action in enumerate(actions):
            self.env_steps += 1
            is_last = index == len(actions) - 1
            is_observed = observe and is_last and self.env_steps < self.max_env_steps
            if self._step(action, result, is_observed):
                return True
        return False

    def _step(self, action: np.ndarray, result: ChunkResult, is_observed: bool) -> bool:
        """Make one env step; adds its drawing to the result, and returns whether the task is solved.

        The policy's cameras render if `is_observed`, else agentview if a video is recorded, else none.
        """
        simulator = self._built()
        recorded = CAMERAS[:1] if self._episode.start.record else ()
        cameras = self._cameras if is_observed else recorded
        simulator.gate.seconds = 0.0
        self._episode.raw, success = simulator.step(action, cameras)
        result.render_s += simulator.gate.seconds
        if self._episode.start.record:
            result.frames.append(upright(self._episode.raw["agentview_image"]))
        return success

    def observation(self) -> Observation:
        """What the policy sees, in the conventions of the published OpenVLA-OFT evaluation.

        Images (num_images, 256, 256, 3), upright; proprio (8,): hand position (m), axis-angle (rad), finger joints (m).
        """
        from robosuite.utils.transform_utils import quat2axisangle

        raw = self._episode.raw
        variant = self._episode.variant
        frames = {camera: raw[f"{camera}_image"] for camera in self._cameras}
        if variant is not None and variant.noise:
            seed = self._episode.start.seed
            frames["agentview"] = variant.noisy(frames["agentview"], seed, self.env_steps)
        # LIBERO renders upside down; the images of the training data were turned, too.
        images = np.stack([upright(frame) for frame in frames.values()])
        hand = raw["robot0_eef_pos"]
        rotation = quat2axisangle(raw["robot0_eef_quat"].copy())
        proprio = np.concatenate([hand, rotation, raw["robot0_gripper_qpos"]], dtype=np.float64)
        return Observation(images, proprio, self.instruction, state=self._critics_state(hand))

    def _critics_state(self, hand: np.ndarray) -> np.ndarray:
        """What a critic sees: the simulation's state, (D,) float32.

        Joint positions, the robot's joint velocities (9,), the hand's position (3,), the vectors from the hand to every
        object (3 each), and the share of the step limit that has been used.
        """
        data = self.domain.sim.data
        to_objects = [position - hand for position, _ in self._built().object_poses().values()]
        share_used = self.env_steps / self.max_env_steps
        return np.concatenate([data.qpos, data.qvel[:9], hand, *to_objects, [share_used]], dtype=np.float32)


def upright(image: np.ndarray) -> np.ndarray:
    """Turn one frame (256, 256, 3) by 180 degrees: LIBERO delivers images upside down."""
    return np.ascontiguousarray(image[::-1, ::-1])
