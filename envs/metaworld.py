"""One Meta-World task behind the contract of `envs.libero.LiberoEnv`: whole chunks, and a picture where one is read.

An episode: reset (the task draws the places of its objects and of its goal, by a seed), then chunks until success or
the step limit. Physics and pictures are those of Meta-World's own env; nothing of it is sped up but what is not drawn.
"""

import atexit
import importlib
import logging
import time
from typing import Any

import numpy as np

from contracts import BadInput, Observation
from envs import rendering
from envs.assets import METAWORLD_LOOKS, find_pack
from envs.libero import IMAGE_SIZE, ChunkResult, EnvSpec, Physics, check_stability, run_part, upright
from envs.perturb import Perturbation
from envs.tasks import METAWORLD_TASKS

log = logging.getLogger(__name__)
CAMERA = "corner2"
CAMERA_POSITION = (
    0.75,
    0.075,
    0.7,
)  # metres; nearer than Meta-World's, as public demonstrations have it (Seo 2022)
# Of the 500 of Meta-World's horizon. Its experts solve 984 of 1,000 episodes (20 of each task) in those, 974 in these.
MAX_ENV_STEPS = 200
NUM_INIT_STATES = 50  # of each task, as many as its benchmark draws
STORED, FRESH = range(2)  # streams of the seeds of initial states: a fresh one is none of the 50


class MetaWorldEnv:
    """One task. The simulator behind it is built by the first reset, and again by the next one after a fault."""

    action_dim = (
        4  # motion of the hand along x, y, z and effort of the gripper (-1 opens, 1 closes), all in [-1, 1]
    )

    def __init__(self, spec: EnvSpec, task_id: int) -> None:
        if spec.num_images != 1:
            raise BadInput(
                f"Meta-World has one picture, the policy reads {spec.num_images}: use another --checkpoint"
            )
        self.spec, self.task_id = spec, task_id
        self.name, self.instruction = list(METAWORLD_TASKS.items())[task_id]
        self.max_env_steps = spec.max_env_steps or MAX_ENV_STEPS
        self.num_init_states = NUM_INIT_STATES
        self.raw = np.zeros(39)  # Meta-World's own observation: all that its scripted experts read
        self._env: Any = None  # Meta-World's, and what draws it
        self._renderer: Any = None
        self.running, self.frames, self.render_s = False, list[np.ndarray](), 0.0

    def reset(
        self, init_state_id: int | None, seed: int = 0, record: bool = False, physics: Physics = "exact",
        perturbation: Perturbation | None = None, observe: bool = True,
    ) -> ChunkResult:  # fmt: skip
        """Start an episode, as a function of the arguments alone; render only if `observe`. Raises BadInput.

        Initial state i is the task's draw of number i; without one (None) `seed` draws. Both kinds of `physics` are
        Meta-World's, and nothing perturbs it.
        """
        assert init_state_id is None or init_state_id in range(NUM_INIT_STATES), (
            f"initial state {init_state_id} of 50"
        )
        self.running, self._recording, self.env_steps = True, record, 0
        stream = [FRESH, seed] if init_state_id is None else [STORED, init_state_id]
        return run_part(self, lambda: self._start(np.random.default_rng(stream)), observe)

    def step_chunk(self, actions: np.ndarray, observe: bool = True) -> ChunkResult:
        """Execute `actions` (n, 4) one after the other, up to success or the step limit; then observe, or don't."""
        assert self.running, "no episode is running: reset first"
        actions = np.asarray(actions, dtype=np.float64)[: self.max_env_steps - self.env_steps]
        if actions.shape[1:] != (self.action_dim,):
            raise BadInput(
                f"the policy decides {actions.shape[1]} numbers, Meta-World takes 4: use another --checkpoint"
            )
        return run_part(self, lambda: self._execute(actions), observe)

    def close(self) -> None:
        """Free the simulator. Also called at exit: GL contexts must go before GL itself does."""
        self.running = False
        if self._env is not None:
            self._env = None
            renderer, self._renderer = self._renderer, None
            atexit.unregister(self.close)
            renderer.close()

    def _start(self, generator: np.random.Generator) -> bool:
        if self._env is None:
            self._env, self._renderer = _build(self.name)
            self._env.max_path_length = (
                self.max_env_steps + 1
            )  # it refuses to step beyond; the limit is ours to apply
            atexit.register(self.close)
        self._env.np_random = generator
        self.raw, _ = self._env.reset()
        check_stability(self._env.data)
        return False

    def _execute(self, actions: np.ndarray) -> bool:
        for action in actions:
            self.env_steps += 1
            self.raw, _, _, _, info = self._env.step(action)
            check_stability(self._env.data)
            if self._recording:
                self.frames.append(self._picture())
            if info["success"]:
                return True
        return False

    def observation(self) -> Observation:
        """The picture; the hand's position (m) and the gripper's opening (0 to 1); for critics all that there is."""
        state = np.append(self.raw, self.env_steps / self.max_env_steps).astype(np.float32)
        return Observation(self._picture()[None], self.raw[:4].copy(), self.instruction, state=state)

    def _picture(self) -> np.ndarray:
        started = time.perf_counter()
        self._renderer.update_scene(self._env.data, camera=CAMERA)
        image = upright(self._renderer.render())  # Meta-World's corner cameras stand on their heads
        self.render_s += time.perf_counter() - started
        return image


def _build(name: str) -> tuple[Any, Any]:
    """Meta-World's env of a task, and a `mujoco.Renderer` of it, without shadows and multisampling as LIBERO's."""
    find_pack(METAWORLD_LOOKS)  # else it is not installed
    rendering.prepare()
    with rendering.render_device():
        import mujoco
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        importlib.reload(
            mujoco.gl_context
        )  # has read MUJOCO_GL at its import, perhaps before `prepare` has set it
        # Without a handler MuJoCo writes its warnings into MUJOCO_LOG.TXT in the current folder.
        mujoco.set_mju_user_warning(lambda message: log.warning("mujoco: %s", message))
        env = ALL_V3_ENVIRONMENTS[name]()
        env.model.vis.quality.offsamples = 0
        env.model.camera(CAMERA).pos = CAMERA_POSITION
        renderer = mujoco.Renderer(env.model, IMAGE_SIZE, IMAGE_SIZE)
    renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
    # As its multi-task benchmark: the goal is part of the observation. Places are drawn from the env's generator.
    env._partially_observable = False
    del env.sawyer_observation_space  # cached, with bounds that hide the goal
    env._freeze_rand_vec, env.seeded_rand_vec, env._set_task_called = False, True, True
    return env, renderer
