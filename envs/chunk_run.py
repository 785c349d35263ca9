"""Measure one reset or chunk of actions and turn faults into results: what every simulator's env needs."""

import logging
import time
from contextlib import suppress
from types import TracebackType
from typing import Protocol

import numpy as np

from contracts import BadInput, Observation
from envs.env import ChunkResult

log = logging.getLogger(__name__)


class RunningEnv(Protocol):
    """What a `ChunkRun` needs to know of its env."""

    name: str
    env_steps: int  # of the running episode, so far
    max_env_steps: int

    def close(self) -> None: ...


class ChunkRun:
    """A context manager around a reset or a chunk; after the block `result` returns its outcome.

    It measures the time and counts the env steps. An exception inside the block closes the env, because the simulator
    is in an unknown state. BadInput is raised again; every other exception becomes the `error` of the result.
    """

    def __init__(self, env: RunningEnv) -> None:
        self._env = env
        self._env_steps_before = env.env_steps
        self._started = time.perf_counter()
        self._error: str | None = None
        self.success = False
        self.observation: Observation | None = None
        self.frames: list[np.ndarray] = []
        self.render_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended."""
        reached_limit = self._env.env_steps >= self._env.max_env_steps
        return self.success or reached_limit or self._error is not None

    def __enter__(self) -> "ChunkRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(fault, Exception):  # no fault, or Ctrl-C
            return False
        with suppress(Exception):  # a simulator that has failed may fail to close
            self._env.close()
        if isinstance(fault, BadInput):
            return False
        log.warning("simulator fault in %s, env step %d", self._env.name, self._env.env_steps, exc_info=fault)
        self._error = f"{type(fault).__name__}: {fault}"
        self.observation = None
        return True

    def result(self) -> ChunkResult:
        """The outcome, once the block has ended."""
        return ChunkResult(
            observation=self.observation,
            success=self.success,
            executed=self._env.env_steps - self._env_steps_before,
            env_steps=self._env.env_steps,
            done=self.is_over,
            error=self._error,
            sim_s=time.perf_counter() - self._started - self.render_s,
            render_s=self.render_s,
            frames=self.frames,
        )
