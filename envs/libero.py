"""One LIBERO task as an env that executes whole chunks of actions and renders only what the policy reads.

An episode: reset (seeded placement of fixtures, initial state, 10 settling steps), then chunks until the task's
success predicate holds or the suite's step limit is reached.
"""

import atexit
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.assets import find_assets
from envs.init_states import load_init_states
from envs.observation import CAMERAS, Observation, observation_from_libero, upright
from envs.simulator import Simulator
from envs.tasks import (
    MAX_ENV_STEPS,
    NUM_SAMPLED_INIT_STATES,
    TaskFiles,
    TaskInfo,
    bddl_task,
    check_task_ids,
    count_init_states,
    suite_task,
)
from errors import BadInput
from interrupts import finished_first, pass_on_interrupt

LOG = logging.getLogger(__name__)
SETTLING_STEPS = 10  # initial states hold the objects some centimetres above the table
SETTLING_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # no motion, gripper open


@dataclass(frozen=True)
class EnvSpec:
    """Recipe of the envs of a run; plain data that travels to worker processes."""

    task_suite: str  # a key of envs.tasks.MAX_ENV_STEPS
    task_ids: tuple[int, ...]
    num_images: int = 2  # 1: agentview; 2: agentview and wrist
    assets: str = "lowpoly"  # "lowpoly", "official" or a folder
    bddl_file: str | None = None  # a task of one's own, as task id 0, with the step limit of task_suite
    max_env_steps: int | None = None  # None: the suite's
    render_backend: str | None = None  # "egl" or "osmesa"; None: MUJOCO_GL, else EGL
    render_gpu: int | None = None  # EGL device index; None: see envs.egl.choose_egl_device

    def __post_init__(self) -> None:
        if self.num_images not in (1, 2):
            raise BadInput(f"num_images {self.num_images}: LIBERO policies read 1 (agentview) or 2 (and wrist) images")
        if self.bddl_file is None:
            check_task_ids(self.task_suite, self.task_ids)
        elif self.task_suite not in MAX_ENV_STEPS or tuple(self.task_ids) != (0,):
            raise BadInput(f"a BDDL file is task id 0 with the step limit of a suite: {', '.join(MAX_ENV_STEPS)}")
        if self.max_env_steps is not None and self.max_env_steps < 1:
            raise BadInput(f"max_env_steps {self.max_env_steps}: an episode needs at least one env step")


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
    frames: list[np.ndarray] = field(default_factory=list)  # agentview (256, 256, 3) of every env step when recording
    preprocess_s: float = 0.0


def task_files(spec: EnvSpec, task_id: int) -> TaskFiles:
    if spec.bddl_file is None:
        return suite_task(spec.task_suite, task_id)
    if task_id != 0:
        raise BadInput(f"unknown task id {task_id}: a BDDL file is task id 0")
    return bddl_task(spec.bddl_file)


def task_info(spec: EnvSpec) -> list[TaskInfo]:
    """The tasks of a recipe, without building an env."""
    limit = spec.max_env_steps or MAX_ENV_STEPS[spec.task_suite]
    tasks = [(task_id, task_files(spec, task_id)) for task_id in spec.task_ids]
    return [TaskInfo(task_id, t.name, t.instruction, limit, count_init_states(t)) for task_id, t in tasks]


class LiberoEnv:
    """One task. The simulator behind it is built by the first reset, and again by the next one after a fault."""

    def __init__(self, spec: EnvSpec, task_id: int) -> None:
        self.spec = spec
        self.task_id = task_id
        self._files = task_files(spec, task_id)
        self._init_states = load_init_states(self._files.init_states) if self._files.init_states else None
        self.instruction = self._files.instruction
        self.max_env_steps = spec.max_env_steps or MAX_ENV_STEPS[spec.task_suite]
        self.num_init_states = NUM_SAMPLED_INIT_STATES if self._init_states is None else len(self._init_states)
        self._cameras = CAMERAS[: spec.num_images]
        self._simulator: Simulator | None = None
        self._running = False
        self._recording = False
        self._env_steps = 0
        self._frames: list[np.ndarray] = []

    def reset(self, init_state_id: int, seed: int = 0, record: bool = False, observe: bool = True) -> ChunkResult:
        """Start an episode; its first observation depends on the arguments only, not on what happened before.

        Without `observe` nothing is rendered and the result has no observation.
        Raises BadInput for an initial state that does not exist and for everything else that the user can repair.
        """
        if not 0 <= init_state_id < self.num_init_states:
            raise BadInput(f"initial state {init_state_id} of {self._files.name}: it has 0..{self.num_init_states - 1}")
        self._running, self._recording, self._env_steps = True, record, 0
        return self._guarded(lambda: self._start(init_state_id, seed, observe), observe)

    def step_chunk(self, actions: np.ndarray, observe: bool = True) -> ChunkResult:
        """Execute `actions` (n, 7) one after the other, up to success or the step limit; then observe, or don't."""
        actions = np.asarray(actions, dtype=np.float64)
        if actions.ndim != 2 or actions.shape[1] != 7 or not len(actions) or not np.isfinite(actions).all():
            raise ValueError(f"a chunk is (n, 7) finite numbers, n >= 1; got {actions.shape}")
        if not self._running:
            raise RuntimeError("no episode is running: reset first")
        actions = actions[: self.max_env_steps - self._env_steps]
        return self._guarded(lambda: self._execute(actions, observe), observe)

    @property
    def domain(self) -> Any:
        """LIBERO's own env beneath, with the true poses of all objects; there is one from the first reset on."""
        if self._simulator is None:
            raise RuntimeError("there is no simulator yet: reset first")
        return self._simulator.domain

    @finished_first
    def close(self) -> None:
        """Free the simulator. Also called at exit: GL contexts must go before GL itself does."""
        self._running = False
        if self._simulator is not None:
            simulator, self._simulator = self._simulator, None
            atexit.unregister(self.close)
            simulator.close()

    def _start(self, init_state_id: int, seed: int, observe: bool) -> tuple[Mapping[str, np.ndarray], bool]:
        simulator = self._simulator or self._build()
        if self._init_states is None:  # LIBERO's sampler places the objects, too: another seed for every state
            simulator.reset(seed * self.num_init_states + init_state_id)
        else:
            simulator.reset(seed)
            simulator.set_state(self._init_states[init_state_id])
        for _ in range(SETTLING_STEPS - 1):
            simulator.step(SETTLING_ACTION)
        raw, _ = simulator.step(SETTLING_ACTION, self._cameras if observe else CAMERAS[: self._recording])
        if self._recording:
            self._frames.append(upright(raw["agentview_image"]))
        return raw, False

    @finished_first  # a drawing context that is half there cannot be freed, and says so at the program's end
    def _build(self) -> Simulator:
        self._simulator = Simulator(
            self._files.bddl,
            find_assets(self.spec.assets),
            self._cameras,
            self.spec.render_backend,
            self.spec.render_gpu,
        )
        atexit.register(self.close)
        return self._simulator

    def _execute(self, actions: np.ndarray, observe: bool) -> tuple[Mapping[str, np.ndarray], bool]:
        simulator, success = self._simulator, False
        assert simulator is not None, "an episode is running"
        while not success and len(actions):
            action, actions = actions[0], actions[1:]
            self._env_steps += 1
            observed = observe and not len(actions) and self._env_steps < self.max_env_steps
            raw, success = simulator.step(action, self._cameras if observed else CAMERAS[: self._recording])
            if self._recording:
                self._frames.append(upright(raw["agentview_image"]))
        return raw, success

    def _guarded(self, part: Callable[[], tuple[Mapping[str, np.ndarray], bool]], observe: bool) -> ChunkResult:
        """Run a part of an episode; a fault of the simulator ends the episode and costs the simulator its life."""
        started, steps_before = time.perf_counter(), self._env_steps
        rendered_before = self._simulator.gate.seconds if self._simulator else 0.0
        self._frames = []
        raw: Mapping[str, np.ndarray] = {}
        success, error = False, None
        try:
            raw, success = part()
        except BadInput:
            self.close()
            raise
        except Exception as fault:
            pass_on_interrupt(fault)
            LOG.warning("simulator fault in %s, env step %d", self._files.name, self._env_steps, exc_info=True)
            error = f"{type(fault).__name__}: {fault}"
        render_s = self._simulator.gate.seconds - rendered_before if self._simulator else 0.0
        done = success or error is not None or self._env_steps >= self.max_env_steps
        if error is not None:
            with suppress(Exception):  # what has failed may fail to close
                self.close()
        self._running = not done
        return ChunkResult(
            None if done or not observe else observation_from_libero(raw, self.spec.num_images, self.instruction),
            success,
            self._env_steps - steps_before,
            self._env_steps,
            done,
            error,
            time.perf_counter() - started - render_s,
            render_s,
            self._frames,
        )
