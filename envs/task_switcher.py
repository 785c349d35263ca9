"""Play episodes of several tasks in one worker of a pool, and keep the last few tasks built."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from contracts import BadInput
from envs.env import ChunkResult, Env, EnvSpec, Start

EnvFactory = Callable[[EnvSpec, int], Env]
# Frames (num_images, 256, 256, 3) -> (num_images, S, S, 3), both uint8: the part of a policy's preprocessing that the
# worker does, because it has the frames.
Prepare = Callable[[np.ndarray], np.ndarray]


# A task and the start of its episode, or the actions (n, action_dim) of a chunk of that episode.
Request = tuple[int, Start] | np.ndarray


class TaskSwitcher:
    """Plays episodes of several tasks, one after the other. The envs of the last few tasks stay built."""

    def __init__(self, spec: EnvSpec, make_env: EnvFactory, prepare: Prepare | None = None) -> None:
        self._spec = spec
        self._make_env = make_env
        self._prepare = prepare
        self._envs: dict[int, Env] = {}  # by task id; the last one is the one that plays

    def __call__(self, request: Request) -> ChunkResult:
        """Execute a request; returns its outcome, with preprocessed images if there is a `prepare`. Raises BadInput."""
        if isinstance(request, np.ndarray):
            playing_env = next(reversed(self._envs.values()))
            if request.shape[1] != playing_env.action_dim:
                raise BadInput(
                    f"the policy's actions have {request.shape[1]} numbers, {playing_env.name} takes "
                    f"{playing_env.action_dim}: use a checkpoint of this robot"
                )
            result = playing_env.step_chunk(request)
        else:
            task_id, start = request
            result = self._env_of(task_id).reset(start)
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
