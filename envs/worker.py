"""One simulator in a process of its own: the process's program (`main`) and the parent's handle on it (`Worker`).

Images travel through memory that both share. The child ends when told so, when the socket closes, and when its parent
is gone, even if it hangs inside the simulator then.
"""

import math
import mmap
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from child_process import end_child, start_child
from envs.libero import ChunkResult, EnvSpec
from errors import BadInput

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "LP_NUM_THREADS")
RECEIVE_S = 30  # for the rest of an answer whose first bytes are there
SHARED_BYTES = 64 * 2**20  # more than any answer holds; pages that nobody writes to take no memory

# Makes something like a LiberoEnv; where a reset plays the whole episode (envs.playing), it has no step_chunk.
EnvFactory = Callable[[EnvSpec, int], Any]
Prepare = Callable[[np.ndarray], np.ndarray]  # frames (num_images, 256, 256, 3) -> (num_images, S, S, 3), uint8

KEPT_ENVS = 3  # of different tasks, per slot: building one takes seconds, keeping it some 100 MB


@dataclass(frozen=True)
class Reset:
    task_id: int
    init_state_id: int
    seed: int
    record: bool


@dataclass(frozen=True)
class Step:
    actions: np.ndarray  # (n, 7)


class SlotEnv:
    """Executes requests on the env of the task that was last asked for, and keeps those of a few tasks before it.

    With `prepare` the observations come back prepared: preprocessing costs a simulator's time, not the policy's.
    """

    def __init__(self, spec: EnvSpec, make_env: EnvFactory, prepare: Prepare | None = None) -> None:
        self._spec = spec
        self._make_env = make_env
        self._prepare = prepare
        self._envs: dict[int, Any] = {}  # by task id, the last used one last

    def run(self, request: Reset | Step) -> ChunkResult:
        if isinstance(request, Step):
            result = next(reversed(self._envs.values())).step_chunk(request.actions)
        else:
            result = self._env_of(request.task_id).reset(request.init_state_id, request.seed, request.record)
        if self._prepare is None or result.observation is None:
            return result
        started = time.perf_counter()
        observation = replace(result.observation, images=self._prepare(result.observation.images), prepared=True)
        return replace(result, observation=observation, preprocess_s=time.perf_counter() - started)

    def _env_of(self, task_id: int) -> Any:
        env = self._envs.pop(task_id, None)
        if env is None:
            if len(self._envs) == KEPT_ENVS:
                self._envs.pop(next(iter(self._envs))).close()
            env = self._make_env(self._spec, task_id)
        self._envs[task_id] = env
        return env

    def close(self) -> None:
        while self._envs:
            self._envs.popitem()[1].close()


def main(socket_fd: int, memory_fd: int) -> None:
    """The child: first the recipe, then requests until `None` or the end of the connection; one answer each."""
    connection, memory = Connection(socket_fd), mmap.mmap(memory_fd, SHARED_BYTES)
    try:
        slot_env = SlotEnv(*connection.recv())
        while (request := connection.recv()) is not None:
            try:
                answer: ChunkResult | BadInput = slot_env.run(request)
            except BadInput as fault:
                answer = fault
            connection.send(pack(answer, memory))
        slot_env.close()
    except (EOFError, ConnectionError):  # the parent is gone or has given this worker up
        pass


def pack(answer: ChunkResult | BadInput, memory: mmap.mmap) -> tuple[bytes, list[int]]:
    """Pickle `answer`, its arrays one after the other in `memory` and only their sizes (bytes) in the message."""
    arrays: list[pickle.PickleBuffer] = []
    message = pickle.dumps(answer, protocol=5, buffer_callback=arrays.append)
    memory.seek(0)
    return message, [memory.write(array.raw()) for array in arrays]


def unpack(message: bytes, sizes: list[int], memory: mmap.mmap) -> ChunkResult | BadInput:
    """What `pack` packed, with copies of the arrays: the next answer overwrites `memory`."""
    memory.seek(0)
    return pickle.loads(message, buffers=[bytearray(memory.read(size)) for size in sizes])


class Worker:
    """The parent's handle on one child. At most one request is under way (`deadline` is set then)."""

    def __init__(self, spec: EnvSpec, make_env: EnvFactory, prepare: Prepare | None = None) -> None:
        memory_fd = os.memfd_create("frames")  # has no name that could outlive us
        os.ftruncate(memory_fd, SHARED_BYTES)
        self.process, self.connection = start_child(
            "envs.worker", RECEIVE_S, (memory_fd,), dict.fromkeys(ONE_THREAD, "1")
        )
        self._memory = mmap.mmap(memory_fd, SHARED_BYTES)
        os.close(memory_fd)
        with suppress(OSError):
            self.connection.send((spec, make_env, prepare))
        self.deadline = math.inf  # time.monotonic() by which the answer must be here
        self.episodes = 0

    def request(self, request: Reset | Step, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.episodes += isinstance(request, Reset)
        with suppress(OSError):  # it has died: the next receive() finds out
            self.connection.send(request)

    def receive(self) -> ChunkResult | BadInput:
        """The answer; call it when the connection is readable. Raises EOFError or OSError if the worker has died."""
        message, sizes = self.connection.recv()
        self.deadline = math.inf
        return unpack(message, sizes, self._memory)

    def close(self) -> None:
        """Ask an idle worker to finish; end one at work, whose result nobody will read."""
        if self.deadline < math.inf:
            self.process.kill()
        with suppress(OSError):
            self.connection.send(None)
        self.connection.close()

    def end(self, show_stack: bool = False) -> str:
        """Wait for a dead or closed worker, kill it where that takes too long; returns what had become of it."""
        ending = end_child(self.process, show_stack)
        self.connection.close()
        self._memory.close()
        return ending
