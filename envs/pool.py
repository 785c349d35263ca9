"""Run several envs in parallel. Rollouts and evaluation use simulators through a `Pool` only.

Each slot of a pool runs one episode at a time. `reset` and `step` start work and return at once; `ready` returns the
results that have arrived. If the simulator fails, the result has an `error`, and the slot recovers with its next reset.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from contracts import BadInput
from envs.assets import find_pack
from envs.env import ChunkResult, Env, EnvSpec, Start, TaskInfo
from envs.libero import LiberoEnv
from envs.libero_imports import check_versions
from envs.task_switcher import EnvFactory, Prepare, TaskSwitcher
from envs.worker import NoAnswer, ProcessWorker, Worker

log = logging.getLogger(__name__)
RESET_TIMEOUT_S = 300.0  # for a reset, which may have to build the simulator
STEP_TIMEOUT_S = 120.0  # for a chunk
RECYCLE_AFTER = 2000  # a worker is replaced after so many episodes, because its memory may grow slowly
EARLY_WAKING_S = 0.1  # a wait may end so much before its timeout

Simulators = Literal["processes", "ray"]  # the values of --simulators


def make_env(spec: EnvSpec, task_id: int) -> Env:
    """The env of a task. Another simulator is chosen here, by the name of its suite. Raises BadInput."""
    return LiberoEnv(spec, task_id)


def task_info(spec: EnvSpec) -> list[TaskInfo]:
    """Describe the tasks of `spec`, without building a simulator. Raises BadInput."""
    if not spec.task_ids or len(set(spec.task_ids)) < len(spec.task_ids):
        raise BadInput(f"task ids must be one or more different numbers, found {spec.task_ids}")
    envs = [make_env(spec, task_id) for task_id in spec.task_ids]
    return [
        TaskInfo(env.task_id, env.name, env.instruction, env.max_env_steps, env.num_init_states)
        for env in envs
    ]


def make_pool(
    spec: EnvSpec, num_envs: int, prepare: Prepare | None = None, simulators: Simulators = "processes"
) -> "Pool":
    """Make a pool for the tasks of `spec`; `prepare` is the part of the policy's preprocessing that its workers do.

    Raises BadInput.
    """
    check_versions()
    spec = _spec_for_workers(spec, simulators)
    return Pool(spec, num_envs, make_env, prepare, _worker_class(simulators))


def _spec_for_workers(spec: EnvSpec, simulators: Simulators) -> EnvSpec:
    """`spec` with absolute paths."""
    # Find the asset pack (and unpack "lowpoly") once, now, rather than in all workers at the same time.
    pack = find_pack(spec.assets)
    # On a Ray cluster a name such as "lowpoly" stays a name: each machine has the pack in a folder of its own.
    if simulators == "processes" or pack.name != spec.assets:
        spec = replace(spec, assets=str(pack.folder))
    if spec.bddl_file is not None:
        spec = replace(spec, bddl_file=str(Path(spec.bddl_file).absolute()))
    return spec


def _worker_class(simulators: Simulators) -> type[Worker]:
    """Workers on a Ray cluster, or in a process each.

    Raises BadInput if Ray is not installed, or if there is no cluster.
    """
    if simulators == "ray":
        from envs import ray_workers  # imports ray, which is not always installed

        ray_workers.connect()
        return ray_workers.RayWorker
    return ProcessWorker


class Pool:
    """Plays one episode at a time in each of `num_envs` slots.

    Each slot has a worker. A worker that dies or misses its deadline is replaced, and its episode ends in an error. A
    worker that has played `recycle_after` episodes is replaced between two episodes.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        make_env: EnvFactory,
        prepare: Prepare | None = None,
        worker_class: type[Worker] = ProcessWorker,
        step_timeout_s: float = STEP_TIMEOUT_S,
        recycle_after: int = RECYCLE_AFTER,
    ) -> None:
        self.spec = spec
        self.num_slots = num_envs
        self._make_env = make_env
        self._prepare = prepare
        self._step_timeout_s = step_timeout_s
        self._recycle_after = recycle_after
        self._worker_class = worker_class
        self._workers = [self._new_worker() for _ in range(num_envs)]
        self._episodes = [0] * num_envs  # played by each slot's present worker
        self._at_work = [False] * num_envs

    def _new_worker(self) -> Worker:
        return self._worker_class(TaskSwitcher, self.spec, self._make_env, self._prepare)

    def reset(self, slot: int, task_id: int, start: Start) -> None:
        """Start an episode of a task in a slot."""
        self._claim(slot)
        if self._episodes[slot] >= self._recycle_after:
            self._replace(slot)
        self._episodes[slot] += 1
        self._workers[slot].request((task_id, start), timeout_s=RESET_TIMEOUT_S)

    def step(self, slot: int, actions: np.ndarray) -> None:
        """Start a chunk of actions (n, action_dim) in a slot whose episode is not over."""
        self._claim(slot)
        self._workers[slot].request(actions, timeout_s=self._step_timeout_s)

    def _claim(self, slot: int) -> None:
        assert not self._at_work[slot], f"slot {slot} is still at work: wait for its result"
        self._at_work[slot] = True

    def ready(self, timeout_s: float | None = None) -> list[tuple[int, ChunkResult]]:
        """The (slot, result) pairs that have arrived; waits at most `timeout_s` for the first one.

        Returns an empty list at once if no slot is at work. A worker that died or missed its deadline is replaced; its
        result has an `error`. Raises BadInput.
        """
        at_work = {slot: worker for slot, worker in enumerate(self._workers) if self._at_work[slot]}
        if not at_work:
            return []
        deadline = min(worker.deadline for worker in at_work.values())
        if timeout_s is not None:
            deadline = min(deadline, time.monotonic() + timeout_s)
        waiting_s = max(0.0, deadline - time.monotonic())
        answered = self._worker_class.wait(list(at_work.values()), waiting_s)
        now = time.monotonic() + EARLY_WAKING_S
        finished = [slot for slot, worker in at_work.items() if worker in answered or worker.deadline <= now]
        results = [(slot, self._receive(slot)) for slot in finished]
        for slot in finished:
            self._at_work[slot] = False
        return results

    def _receive(self, slot: int) -> ChunkResult:
        try:
            return self._workers[slot].receive()
        except NoAnswer as reason:
            self._replace(slot)
            error = f"the worker process of slot {slot}: {reason}"
            log.warning("%s; a new one takes its place", error)
            return ChunkResult(done=True, error=error)

    def _replace(self, slot: int) -> None:
        self._workers[slot].close()
        self._workers[slot].end()
        self._workers[slot] = self._new_worker()
        self._episodes[slot] = 0

    def close(self) -> None:
        """End all workers. Idle ones end by themselves; those at work are killed."""
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
