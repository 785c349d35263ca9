"""The interface between this program and a simulator: implement `Env` to add a simulator (docs/OWN_SIMULATOR.md).

An object with the methods of `Env` is one task. It plays one episode at a time, a whole chunk of actions per call.
`envs.libero.LiberoEnv` is one.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from contracts import BadInput, Observation

log = logging.getLogger(__name__)
IMAGE_SIZE = 256  # height and width of every picture, in pixels
# "exact": the simulator's own physics, bit for bit. "fast": a faster approximation, if the simulator has one.
Physics = Literal["exact", "fast"]


class SimulatorFault(Exception):
    """The simulator failed. Neither the policy nor the user is to blame, so the episode does not count."""


@dataclass(frozen=True)
class EnvSpec:
    """Which tasks a run simulates, and how: plain data that is sent to worker processes."""

    task_suite: str
    task_ids: tuple[int, ...]
    num_images: int = 2  # 1: agentview; 2: agentview and wrist
    # `assets`, `bddl_file` and `leaked_prompt` are for LIBERO; another simulator may ignore them.
    assets: str = "lowpoly"  # "lowpoly", "official" or a folder; --assets auto is one of these by now
    bddl_file: str | None = None  # the user's own task: it is task id 0, with the step limit of task_suite
    max_env_steps: int | None = None  # None: the suite's step limit
    # Tasks that each slot of a pool keeps in memory: building a task takes seconds, keeping it takes 0.2 to 0.6 GiB.
    kept_tasks: int = 3
    leaked_prompt: bool = False  # see envs.libero_plus.Variant.instruction


@dataclass(frozen=True)
class TaskInfo:
    """What a run needs to know of a task."""

    task_id: int
    name: str
    instruction: str
    max_env_steps: int
    num_init_states: int


class Start(NamedTuple):
    """How an episode starts and is simulated. It determines the episode, together with the actions."""

    init_state_id: int | None  # None: the seed draws an initial state that is none of the numbered ones
    seed: int = 0
    record: bool = False  # whether to keep a frame of every env step
    physics: Physics = "exact"


@dataclass
class ChunkResult:
    """The outcome of a reset or of a chunk of actions. A reset executes no action."""

    observation: Observation | None = None  # None when the episode is over or the caller asked for none
    success: bool = False
    executed: int = 0  # actions of this chunk that were executed
    env_steps: int = 0  # env steps of the episode so far, settling not counted
    done: bool = False  # success, step limit or error
    error: str | None = None  # the simulator failed: the episode does not count as a failure of the policy
    sim_s: float = 0.0  # seconds of all but drawing: physics, and building the simulator
    render_s: float = 0.0  # seconds of drawing
    frames: list[np.ndarray] = field(default_factory=list)  # (256, 256, 3) of every env step, when recording
    preprocess_s: float = 0.0  # seconds of the policy's image preprocessing, if the slot did it


class Env(Protocol):
    """One task of a simulator.

    Making the object must be cheap and import nothing heavy, because tasks are also listed without a simulator. The
    first reset builds the simulator. After a fault the next reset builds it again.
    """

    task_id: int
    name: str
    instruction: str  # what the policy is told
    max_env_steps: int  # the step limit of an episode
    num_init_states: int  # how many numbered initial states there are: 0, 1, ...
    action_dim: int
    env_steps: int  # of the running episode, so far

    def reset(self, start: Start, observe: bool = True) -> ChunkResult:
        """Start an episode; render only if `observe`. Raises BadInput.

        The episode must depend on `start` and on the actions only, never on earlier episodes: resumed runs and paired
        comparisons rely on it. If the simulator fails, the result's `error` says how.
        """
        ...

    def step_chunk(self, actions: np.ndarray, observe: bool = True) -> ChunkResult:
        """Execute `actions` (n, action_dim), up to success or the step limit; render only if `observe`."""
        ...

    def close(self) -> None:
        """Free the simulator and its GL context. Closing twice does no harm."""
        ...


@contextmanager
def chunk_result(env: Env) -> Iterator[ChunkResult]:
    """Yield the result of a reset or of a chunk of actions that `env` executes within this block.

    The block fills in success, observation, frames and render_s, and `error` where no episode can start; the rest is
    filled in at its end. An exception inside the block closes the env, because the simulator is in an unknown state.
    BadInput is raised again; every other exception becomes the `error` of the result.
    """
    result = ChunkResult()
    env_steps_before = env.env_steps
    started = time.perf_counter()
    try:
        yield result
    except Exception as fault:
        with suppress(Exception):  # a simulator that has failed may fail to close
            env.close()
        if isinstance(fault, BadInput):
            raise
        log.warning("simulator fault in %s, env step %d", env.name, env.env_steps, exc_info=fault)
        result.error = f"{type(fault).__name__}: {fault}"
        result.observation = None
    result.executed = env.env_steps - env_steps_before
    result.env_steps = env.env_steps
    result.done = result.success or result.error is not None or env.env_steps >= env.max_env_steps
    result.sim_s = time.perf_counter() - started - result.render_s
