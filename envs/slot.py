"""Execute the requests of one slot of a pool on the envs of its tasks. This code runs inside a worker."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from envs.env import ChunkResult, Env, EnvSpec, Physics
from envs.perturb import Perturbation

EnvFactory = Callable[[EnvSpec, int], Env]
# Frames (num_images, 256, 256, 3) -> (num_images, S, S, 3), both uint8: the part of a policy's preprocessing that the
# worker does, because it has the frames.
Prepare = Callable[[np.ndarray], np.ndarray]


class Reset(NamedTuple):
    """A request for a new episode: the task and the arguments of `envs.env.Env.reset`."""

    task_id: int
    init_state_id: int | None
    seed: int = 0
    record: bool = False
    physics: Physics = "exact"
    perturbation: Perturbation | None = None


Request = Reset | np.ndarray  # a new episode, or the actions (n, action_dim) of a chunk


class SlotEnv:
    """Plays episodes of several tasks, one after the other. The envs of the last few tasks stay built."""

    def __init__(self, spec: EnvSpec, make_env: EnvFactory, prepare: Prepare | None = None) -> None:
        self._spec = spec
        self._make_env = make_env
        self._prepare = prepare
        self._envs: dict[int, Env] = {}  # by task id; the most recently used env comes last

    def __call__(self, request: Request) -> ChunkResult:
        """Execute a request; returns its outcome, with preprocessed images if there is a `prepare`. Raises BadInput."""
        if isinstance(request, Reset):
            result = self._env_of(request.task_id).reset(
                request.init_state_id,
                request.seed,
                request.record,
                request.physics,
                request.perturbation,
            )
        else:
            last_used = next(reversed(self._envs.values()))
            result = last_used.step_chunk(request)
        return self._prepared(result)

    def _env_of(self, task_id: int) -> Env:
        """The env of a task, made now if necessary. If too many are built, the least recently used env is closed."""
        env = self._envs.pop(task_id, None)
        if env is None:
            if len(self._envs) == self._spec.kept_tasks:
                least_recent_task_id = next(iter(self._envs))
                self._envs.pop(least_recent_task_id).close()
            env = self._make_env(self._spec, task_id)
        self._envs[task_id] = env
        return env

    def _prepared(self, result: ChunkResult) -> ChunkResult:
        if self._prepare is None or result.observation is None:
            return result
        started = time.perf_counter()
        images = self._prepare(result.observation.images)
        observation = replace(result.observation, images=images, prepared=True)
        return replace(result, observation=observation, preprocess_s=time.perf_counter() - started)

    def close(self) -> None:
        """Close all envs, the most recently used one first."""
        while self._envs:
            _, env = self._envs.popitem()
            env.close()
