"""What a simulator is to this program: the contract that the author of another one reads (docs/OWN_SIMULATOR.md).

One object of a class with the methods of `Env` is one task. It plays one episode at a time, in whole chunks of actions.
`envs/libero.py` and `envs/metaworld.py` are the two that exist; `envs.pool.make_env` chooses between them.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from contracts import BadInput, Observation
from envs import tasks
from envs.perturb import Perturbation

IMAGE_SIZE = 256  # height and width of every picture, in pixels
Physics = Literal["exact", "fast"]  # the simulator's own physics to the bit, or a faster one where it has one


class SimulatorFault(Exception):
    """The simulation went wrong by itself: not the policy's failure and not the user's."""


@dataclass(frozen=True)
class EnvSpec:
    """Recipe of the envs of a run: plain data that travels to worker processes. Raises BadInput for unknown tasks."""

    task_suite: str  # a key of envs.tasks.MAX_ENV_STEPS, or METAWORLD
    task_ids: tuple[int, ...]
    num_images: int = 2  # 1: agentview; 2: agentview and wrist
    assets: str = "lowpoly"  # of LIBERO: "lowpoly", "official" or a folder
    bddl_file: str | None = None  # the user's own task, as task id 0, with the step limit of task_suite
    max_env_steps: int | None = None  # None: the suite's
    # Tasks that each slot of a pool keeps in memory: building one takes seconds, keeping it 0.2 to 0.6 GiB.
    kept_tasks: int = 3

    def __post_init__(self) -> None:
        names = ("the BDDL file's",) if self.bddl_file is not None else tasks.task_names(self.task_suite)
        if self.task_ids and all(0 <= task_id < len(names) for task_id in self.task_ids):
            return
        chosen = ", ".join(map(str, self.task_ids)) or "none"
        known = ", ".join(f"{task_id} {name}" for task_id, name in enumerate(names))
        raise BadInput(f"task ids are 0..{len(names) - 1}, found {chosen}; there are: {known}")


@dataclass(frozen=True)
class ChunkResult:
    """Outcome of a reset (no action executed) or of a chunk of actions."""

    observation: Observation | None  # None when the episode is over or the caller asked for none
    success: bool
    executed: int  # actions of this chunk that were executed
    env_steps: int  # env steps of the episode so far, settling not counted
    done: bool  # success, step limit or error
    error: str | None = None  # fault of the simulator: the episode is void, not a failure of the policy
    sim_s: float = 0.0  # seconds of physics
    render_s: float = 0.0  # seconds of drawing
    frames: list[np.ndarray] = field(default_factory=list)  # (256, 256, 3) of every env step, when recording
    preprocess_s: float = 0.0  # seconds of the policy's preprocessing, where the slot does it


class Env(Protocol):
    """One task of a simulator.

    Making the object must be cheap and import nothing heavy, because tasks are also listed without a simulator. The
    simulator itself is built by the first reset, and again by the reset after a fault.
    """

    task_id: int
    name: str
    instruction: str  # what the policy is told
    max_env_steps: int  # the step limit of an episode
    num_init_states: int  # initial states that are numbered 0, 1, ...
    action_dim: int

    def reset(
        self,
        init_state_id: int | None,
        seed: int = 0,
        record: bool = False,
        physics: Physics = "exact",
        perturbation: Perturbation | None = None,
        observe: bool = True,
    ) -> ChunkResult:
        """Start an episode. It must be a function of these arguments and of the actions, never of earlier episodes:
        resumed runs and paired comparisons rely on it. With `init_state_id` None the seed draws a start that
        evaluations never use. A fault of the simulator is the `error` of the result. Raises BadInput."""
        ...

    def step_chunk(self, actions: np.ndarray, observe: bool = True) -> ChunkResult:
        """Execute `actions` (n, action_dim), up to success or the step limit; render only what is read."""
        ...

    def close(self) -> None:
        """Free the simulator and its GL context. Closing twice does no harm."""
        ...
