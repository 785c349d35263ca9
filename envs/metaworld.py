"""One Meta-World task as an env (`envs.env.Env`) that executes whole chunks of actions and renders only what is read.

An episode begins with a reset, in which the task draws the places of its objects and of its goal from a seed. Chunks of
actions follow until success or the step limit. Physics and images are those of Meta-World's own env; the only
difference is that images are not rendered if nobody reads them.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING

import numpy as np

from contracts import BadInput, Observation
from envs import rendering
from envs.assets import METAWORLD_LOOKS, find_pack
from envs.chunk_run import chunk_result
from envs.closing import close_at_exit, forget
from envs.env import IMAGE_SIZE, ChunkResult, EnvSpec, Start
from envs.mujoco_warnings import check_stability, log_mujoco_warnings
from envs.tasks import METAWORLD_TASKS

if TYPE_CHECKING:
    import mujoco
    from metaworld.sawyer_xyz_env import SawyerXYZEnv

CAMERA = "corner2"
# In metres. Nearer than Meta-World's own camera; the position that public demonstrations use (Seo 2022).
CAMERA_POSITION = (0.75, 0.075, 0.7)
# Meta-World's own limit is 500. Its experts solve 984 of 1,000 episodes (20 of each task) within 500 env steps, and 974
# within 200.
STEP_LIMIT = 200
NUM_INIT_STATES = 50  # of each task; Meta-World's benchmark draws as many
# The first number of a seed: fresh initial states come from another stream than the 50, so they are none of them.
STORED = 0
FRESH = 1


class MetaWorldEnv:
    """One task of Meta-World. The first reset builds the simulator. After a fault the next reset builds it again."""

    # The hand's motion along x, y and z, and the gripper's effort (-1 opens, 1 closes), all in [-1, 1].
    action_dim = 4

    def __init__(self, spec: EnvSpec, task_id: int) -> None:
        if spec.num_images != 1:
            raise BadInput(
                f"Meta-World has one image, the policy reads {spec.num_images}: use another --checkpoint"
            )
        self.spec = spec
        self.task_id = task_id
        self.name, self.instruction = list(METAWORLD_TASKS.items())[task_id]
        self.max_env_steps = spec.max_env_steps or STEP_LIMIT
        self.num_init_states = NUM_INIT_STATES
        self.env_steps = 0
        self.raw = np.zeros(39)  # Meta-World's own observation, which its scripted experts read
        self._env: SawyerXYZEnv | None = None
        self._renderer: mujoco.Renderer | None = None
        self._is_recorded = False
        self._result = ChunkResult()  # of the reset or chunk that is being executed

    def reset(self, start: Start, observe: bool = True) -> ChunkResult:
        """Start an episode that depends on `start` only; render only if `observe`. Raises BadInput.

        `init_state_id` seeds the task's random places; if it is None, `seed` does. Both values of `physics` mean
        Meta-World's own physics.
        """
        index = start.init_state_id
        assert index is None or 0 <= index < NUM_INIT_STATES, f"{start=}"
        self.env_steps = 0
        self._is_recorded = start.record
        with chunk_result(self) as self._result:
            self._start(np.random.default_rng([FRESH, start.seed] if index is None else [STORED, index]))
            if observe:
                self._result.observation = self.observation()
        return self._result

    def step_chunk(self, actions: np.ndarray, observe: bool = True) -> ChunkResult:
        """Execute `actions` (n, 4) one by one, up to success or the step limit; render only if `observe`."""
        assert self._env is not None, "reset first"
        actions = np.asarray(actions, dtype=np.float64)[: self.max_env_steps - self.env_steps]
        with chunk_result(self) as self._result:
            self._result.success = self._execute(actions)
            if observe and not self._result.success and self.env_steps < self.max_env_steps:
                self._result.observation = self.observation()
        return self._result

    def close(self) -> None:
        """Free the simulator. It is also freed at the end of the program."""
        self._env = None
        if self._renderer is not None:
            renderer = self._renderer
            self._renderer = None
            forget(self.close)
            renderer.close()

    def _start(self, generator: np.random.Generator) -> None:
        if self._env is None:
            self._env, self._renderer = _build(self.name)
            # Meta-World raises an error beyond its own step limit. `step_chunk` applies ours.
            self._env.max_path_length = self.max_env_steps + 1
            close_at_exit(self.close)
        self._env.np_random = generator
        self.raw, _ = self._env.reset()
        check_stability(self._env.data)

    def _execute(self, actions: np.ndarray) -> bool:
        """Execute actions up to success; returns whether the task was solved."""
        assert self._env is not None, "reset first"
        for action in actions:
            self.env_steps += 1
            self.raw, _, _, _, info = self._env.step(action)
            check_stability(self._env.data)
            if self._is_recorded:
                self._result.frames.append(self._picture())
            if info["success"]:
                return True
        return False

    def observation(self) -> Observation:
        """What the policy sees: one image (1, 256, 256, 3), and proprio (4,).

        proprio: the hand's position (m) and the gripper's opening (0 to 1). `state` (40,) float32, for critics: all of
        Meta-World's own observation, and the share of the step limit that has been used.
        """
        state = np.append(self.raw, self.env_steps / self.max_env_steps).astype(np.float32)
        return Observation(self._picture()[None], self.raw[:4].copy(), self.instruction, state=state)

    def _picture(self) -> np.ndarray:
        assert self._env is not None, "reset first"
        assert self._renderer is not None, "the renderer is built together with the env"
        started = time.perf_counter()
        self._renderer.update_scene(self._env.data, camera=CAMERA)
        image = rendering.upright(self._renderer.render())
        self._result.render_s += time.perf_counter() - started
        return image


def _build(name: str) -> tuple[SawyerXYZEnv, mujoco.Renderer]:
    """Build Meta-World's env of a task, and its renderer. Raises BadInput if Meta-World is not installed.

    As in LIBERO, there are no shadows and no multisampling.
    """
    find_pack(METAWORLD_LOOKS)
    rendering.prepare_imports()
    with rendering.render_device():
        import mujoco
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        # This module reads MUJOCO_GL when it is imported, which may have happened before `prepare_imports` set it.
        importlib.reload(mujoco.gl_context)
        log_mujoco_warnings()
        env = ALL_V3_ENVIRONMENTS[name]()
        env.model.vis.quality.offsamples = 0
        env.model.camera(CAMERA).pos = CAMERA_POSITION
        renderer = mujoco.Renderer(env.model, IMAGE_SIZE, IMAGE_SIZE)
    renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
    # As in Meta-World's multi-task benchmark, the goal is part of the observation. The env's generator draws places.
    env._partially_observable = False
    del env.sawyer_observation_space  # a cached property, whose bounds would hide the goal
    env._freeze_rand_vec = False
    env.seeded_rand_vec = True
    env._set_task_called = True
    return env, renderer
