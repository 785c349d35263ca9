"""Envs side by side: the only door by which rollouts and evaluation use the simulator.

A pool has slots. Each slot runs one episode at a time: `reset` and `step` start work, `ready` hands out results as they
come. With one slot everything happens in this process (`InlinePool`); with more, every slot has a worker process
(`WorkerPool`). A fault of the simulator is the `error` of its episode; the slot recovers with the next reset.

    with make_pool(spec, num_envs=8) as pool:
        for slot in range(pool.num_slots):
            pool.reset(slot, task_id=0, init_state_id=slot)
        while results := pool.ready():
            for slot, result in results:
                if not result.done:
                    pool.step(slot, actions_for(result.observation))
"""

import logging
import time
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from envs.assets import find_assets
from envs.libero import ChunkResult, EnvSpec, LiberoEnv, TaskInfo, task_info
from envs.setup import check_system, check_versions
from envs.worker import EnvFactory, Prepare, Reset, SlotEnv, Step, Worker
from errors import BadInput

__all__ = ["ChunkResult", "EnvSpec", "InlinePool", "TaskInfo", "WorkerPool", "make_pool", "task_info"]

LOG = logging.getLogger(__name__)
MAX_FAULTS_IN_A_ROW = 5  # episodes of one slot that end in an error, before the machine is taken to be broken


def make_pool(
    spec: EnvSpec, num_envs: int, prepare: Prepare | None = None, make_env: EnvFactory = LiberoEnv
) -> "InlinePool | WorkerPool":
    """A pool for the tasks of `spec`; `prepare` is the part of the policy's preprocessing that its workers do.

    Raises BadInput for what the user can repair, before any process is started.
    """
    if num_envs < 1:
        raise BadInput(f"num_envs {num_envs}: at least one env is needed")
    check_system(spec.render_backend)
    if caution := check_versions():
        LOG.warning(caution)
    task_info(spec)
    # Found (and, for "lowpoly", generated) once, here, rather than by all workers at the same time.
    spec = replace(spec, assets=str(find_assets(spec.assets)))
    return InlinePool(spec, make_env, prepare) if num_envs == 1 else WorkerPool(spec, num_envs, make_env, prepare)


class Slots:
    """What both pools know about their slots: which run an episode, which have failed again and again."""

    def __init__(self, num_slots: int) -> None:
        self.env_steps = [0] * num_slots
        self.running = [False] * num_slots
        self.busy = [False] * num_slots
        self.faults_in_a_row = [0] * num_slots

    def start(self, slot: int, is_reset: bool) -> None:
        if self.busy[slot]:
            raise RuntimeError(f"slot {slot} is still at work: wait for its result")
        if not is_reset and not self.running[slot]:
            raise RuntimeError(f"slot {slot} runs no episode: reset it first")
        self.busy[slot] = True
        if is_reset:
            self.env_steps[slot] = 0

    def finish(self, slot: int, result: ChunkResult) -> ChunkResult:
        self.busy[slot], self.running[slot], self.env_steps[slot] = False, not result.done, result.env_steps
        if result.error is not None:
            self.faults_in_a_row[slot] += 1
        elif result.done:
            self.faults_in_a_row[slot] = 0
        if self.faults_in_a_row[slot] >= MAX_FAULTS_IN_A_ROW:
            raise RuntimeError(
                f"the simulator of slot {slot} failed in {MAX_FAULTS_IN_A_ROW} episodes in a row; "
                f"last error: {result.error}; its traceback is in the log above"
            )
        return result


class InlinePool:
    """One slot, in this process; the work is done by `ready`."""

    num_slots = 1

    def __init__(self, spec: EnvSpec, make_env: EnvFactory = LiberoEnv, prepare: Prepare | None = None) -> None:
        self.restarts = 0  # simulators rebuilt after a fault
        self._slots = Slots(1)
        self._slot_env = SlotEnv(spec, make_env, prepare)
        self._request: Reset | Step | None = None

    def reset(self, slot: int, task_id: int, init_state_id: int, seed: int = 0, record: bool = False) -> None:
        self._slots.start(slot, is_reset=True)
        self._request = Reset(task_id, init_state_id, seed, record)

    def step(self, slot: int, actions: np.ndarray) -> None:
        self._slots.start(slot, is_reset=False)
        self._request = Step(actions)

    def ready(self, timeout_s: float | None = None) -> list[tuple[int, ChunkResult]]:
        """The result of the request under way, if any. `timeout_s` has no meaning within one process."""
        if self._request is None:
            return []
        request, self._request = self._request, None
        result = self._slot_env.run(request)
        self.restarts += result.error is not None
        return [(0, self._slots.finish(0, result))]

    def close(self) -> None:
        self._slot_env.close()

    def __enter__(self) -> "InlinePool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class WorkerPool:
    """One worker process a slot. A worker that dies or misses its deadline is replaced, its episode an error.

    Every wait is bounded: `build_timeout_s` for a reset (which may build the simulator), `step_timeout_s` for a chunk.
    After `recycle_after` episodes a worker is replaced by a fresh one, against memory that creeps up.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        make_env: EnvFactory = LiberoEnv,
        prepare: Prepare | None = None,
        build_timeout_s: float = 300.0,
        step_timeout_s: float = 120.0,
        recycle_after: int = 200,
    ) -> None:
        self.num_slots = num_envs
        self.restarts = 0
        self._recipe = (spec, make_env, prepare)
        self._build_timeout_s = build_timeout_s
        self._step_timeout_s = step_timeout_s
        self._recycle_after = recycle_after
        self._slots = Slots(num_envs)
        self._workers = [Worker(*self._recipe) for _ in range(num_envs)]

    def reset(self, slot: int, task_id: int, init_state_id: int, seed: int = 0, record: bool = False) -> None:
        self._slots.start(slot, is_reset=True)
        if self._workers[slot].episodes >= self._recycle_after:
            self._workers[slot].close()
            self._workers[slot].end()
            self._workers[slot] = Worker(*self._recipe)
        self._workers[slot].request(Reset(task_id, init_state_id, seed, record), self._build_timeout_s)

    def step(self, slot: int, actions: np.ndarray) -> None:
        self._slots.start(slot, is_reset=False)
        self._workers[slot].request(Step(actions), self._step_timeout_s)

    def ready(self, timeout_s: float | None = None) -> list[tuple[int, ChunkResult]]:
        """Results that are there, at least one if any slot is at work, waiting no longer than `timeout_s` for it.

        Raises BadInput that a worker met, and RuntimeError when a slot fails again and again.
        """
        at_work = [slot for slot, busy in enumerate(self._slots.busy) if busy]
        if not at_work:
            return []
        give_up = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        results: list[tuple[int, ChunkResult]] = []
        while not results:
            wake_up = min(give_up, *(self._workers[slot].deadline for slot in at_work))
            connections: dict[Any, int] = {self._workers[slot].connection: slot for slot in at_work}
            answered = [connections[c] for c in wait(connections, max(0.0, wake_up - time.monotonic()))]
            results = [(slot, self._receive(slot)) for slot in answered]
            results += self._overdue([slot for slot in at_work if slot not in answered])
            if time.monotonic() >= give_up:
                break
        return [(slot, self._slots.finish(slot, result)) for slot, result in results]

    def _receive(self, slot: int) -> ChunkResult:
        try:
            answer = self._workers[slot].receive()
        except (EOFError, OSError):
            return self._replace(slot, "died")
        if isinstance(answer, BadInput):
            raise answer
        return answer

    def _overdue(self, at_work: list[int]) -> list[tuple[int, ChunkResult]]:
        now = time.monotonic()
        late = [slot for slot in at_work if self._workers[slot].deadline <= now]
        return [(slot, self._replace(slot, "gave no answer in time", show_stack=True)) for slot in late]

    def _replace(self, slot: int, what_happened: str, show_stack: bool = False) -> ChunkResult:
        end = self._workers[slot].end(show_stack)
        self._workers[slot] = Worker(*self._recipe)
        self.restarts += 1
        error = f"the worker process of slot {slot} {what_happened} ({end})"
        return ChunkResult(None, False, 0, self._slots.env_steps[slot], done=True, error=error)

    def close(self) -> None:
        """End all workers: idle ones in good order, those at work by force."""
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
