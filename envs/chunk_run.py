"""Measure one reset or chunk of actions and turn faults into results: what every simulator's env needs."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from contracts import BadInput
from envs.env import ChunkResult, Env

log = logging.getLogger(__name__)


@contextmanager
def chunk_result(env: Env) -> Iterator[ChunkResult]:
    """Yield the result of a reset or of a chunk of actions that `env` executes within this block.

    The block fills in success, observation, frames and render_s; the rest is filled in at its end. An exception inside
    the block closes the env, because the simulator is in an unknown state. BadInput is raised again; every other
    exception becomes the `error` of the result.
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
