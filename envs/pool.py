"""Envs side by side: the only door by which rollouts and evaluation use the simulator.

Each slot of a pool runs one episode at a time: `reset` and `step` start work, `ready` hands out results as they come. A
fault of the simulator is the `error` of its episode; the slot recovers with the next reset.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from envs.assets import find_pack
from envs.libero import ChunkResult, EnvSpec, LiberoEnv, Physics
from envs.metaworld import MetaWorldEnv
from envs.perturb import Perturbation
from envs.rendering import check_versions
from envs.tasks import METAWORLD, TaskInfo
from envs.worker import NoAnswer, Worker

log = logging.getLogger(__name__)
RESET_TIMEOUT_S = 300.0  # of a worker, which may have to build the simulator

EnvFactory = Callable[[EnvSpec, int], Any]  # makes something like a LiberoEnv
Simulators = Literal["processes", "ray"]  # where the workers are
Prepare = Callable[
    [np.ndarray], np.ndarray
]  # frames (num_images, 256, 256, 3) -> (num_images, S, S, 3), uint8


class Reset(NamedTuple):
    task_id: int
    init_state_id: int | None
    seed: int
    record: bool
    physics: Physics = "exact"
    perturbation: Perturbation | None = None


Request = Reset | np.ndarray  # or the actions (n, action_dim) of a chunk
Results = list[tuple[int, ChunkResult]]  # by slot


def make_env(spec: EnvSpec, task_id: int) -> LiberoEnv | MetaWorldEnv:
    """The env of a task, by the simulator that its suite belongs to. Raises BadInput."""
    return (MetaWorldEnv if spec.task_suite == METAWORLD else LiberoEnv)(spec, task_id)


def task_info(spec: EnvSpec) -> list[TaskInfo]:
    """The tasks of a recipe, without building a simulator. Raises BadInput."""
    envs = [make_env(spec, task_id) for task_id in spec.task_ids]
    return [TaskInfo(e.task_id, e.name, e.instruction, e.max_env_steps, e.num_init_states) for e in envs]


def make_pool(
    spec: EnvSpec, num_envs: int, prepare: Prepare | None = None, simulators: Simulators = "processes"
) -> "Pool":
    """A pool for the tasks of `spec`; `prepare` is the part of the policy's preprocessing that its workers do."""
    if caution := check_versions():
        log.warning(caution)
    # Found (and, for "lowpoly", generated) once, here, rather than by all workers at the same time.
    pack = find_pack(spec.assets)
    if (
        simulators == "processes" or pack.name != spec.assets
    ):  # each machine has a folder of its own for a name
        spec = replace(spec, assets=str(pack.folder))
    if spec.bddl_file is not None:
        spec = replace(spec, bddl_file=str(Path(spec.bddl_file).absolute()))
    if simulators == "processes" and num_envs == 1:
        return Pool(spec, prepare=prepare)
    return WorkerPool(spec, num_envs, prepare=prepare, simulators=simulators)


class SlotEnv:
    """Executes requests on the env of the task that was last asked for, and keeps those of a few tasks before it."""

    def __init__(self, spec: EnvSpec, make_env: EnvFactory, prepare: Prepare | None = None) -> None:
        self._spec, self._make_env, self._prepare = spec, make_env, prepare
        self._envs: dict[int, Any] = {}  # by task id, the last used one last

    def __call__(self, request: Request) -> ChunkResult:
        if isinstance(request, Reset):
            env = self._envs.pop(request.task_id, None)
            if env is None and len(self._envs) == self._spec.kept_tasks:
                self._envs.pop(next(iter(self._envs))).close()
            self._envs[request.task_id] = env = env or self._make_env(self._spec, request.task_id)
            result = env.reset(*request[1:])
        else:
            result = next(reversed(self._envs.values())).step_chunk(request)
        if self._prepare is None or result.observation is None:
            return result
        started = time.perf_counter()
        observation = replace(
            result.observation, images=self._prepare(result.observation.images), prepared=True
        )
        return replace(result, observation=observation, preprocess_s=time.perf_counter() - started)

    def close(self) -> None:
        while self._envs:
            self._envs.popitem()[1].close()


class Pool:
    """One slot, in this process: `ready` does the work."""

    def __init__(
        self,
        spec: EnvSpec,
        make_env: EnvFactory = make_env,
        prepare: Prepare | None = None,
        num_slots: int = 1,
    ) -> None:
        self.num_slots = num_slots
        self._recipe = (spec, make_env, prepare)
        self._slot_env = SlotEnv(*self._recipe)
        self._requests: list[Request | None] = [None] * num_slots  # under way

    def reset(
        self, slot: int, task_id: int, init_state_id: int | None, seed: int = 0, record: bool = False,
        physics: Physics = "exact", perturbation: Perturbation | None = None,
    ) -> None:  # fmt: skip
        """Start an episode in a slot (`envs.libero.LiberoEnv.reset`)."""
        self._start(slot, Reset(task_id, init_state_id, seed, record, physics, perturbation))

    def step(self, slot: int, actions: np.ndarray) -> None:
        """Start a chunk of actions (n, action_dim) in a slot whose episode is not over."""
        self._start(slot, actions)

    def ready(self, timeout_s: float | None = None) -> Results:
        """Results that are there; waits for one if any slot is at work, at most `timeout_s`. Raises BadInput."""
        results = self._results(timeout_s)
        for slot, _ in results:
            self._requests[slot] = None
        return results

    def _start(self, slot: int, request: Request) -> None:
        assert self._requests[slot] is None, f"slot {slot} is still at work: wait for its result"
        self._requests[slot] = request

    def _results(self, timeout_s: float | None) -> Results:
        return [(0, self._slot_env(request)) for request in self._requests if request is not None]

    def close(self) -> None:
        self._slot_env.close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class WorkerPool(Pool):
    """One worker process a slot, replaced when it dies or misses its deadline (its episode: an error) or grows old."""

    def __init__(
        self, spec: EnvSpec, num_envs: int, make_env: EnvFactory = make_env, prepare: Prepare | None = None,
        step_timeout_s: float = 120.0, recycle_after: int = 2000, simulators: Simulators = "processes",
    ) -> None:  # fmt: skip
        super().__init__(spec, make_env, prepare, num_envs)
        self._step_timeout_s, self._recycle_after = step_timeout_s, recycle_after
        self._kind: Any = Worker
        if simulators == "ray":
            from envs import ray_workers  # which takes what is not always installed

            ray_workers.connect()
            self._kind = ray_workers.RayWorker
        self._workers = [self._kind(SlotEnv, *self._recipe) for _ in range(num_envs)]
        self._episodes = [0] * num_envs  # of the slot's present worker

    def _start(self, slot: int, request: Request) -> None:
        super()._start(slot, request)
        if is_reset := isinstance(request, Reset):
            if self._episodes[slot] >= self._recycle_after:  # against memory that may creep up
                self._replace(slot)
            self._episodes[slot] += 1
        self._workers[slot].request(request, timeout_s=RESET_TIMEOUT_S if is_reset else self._step_timeout_s)

    def _results(self, timeout_s: float | None) -> Results:
        at_work = {slot: w for slot, w in enumerate(self._workers) if self._requests[slot] is not None}
        if not at_work:
            return []
        left = min(worker.deadline for worker in at_work.values()) - time.monotonic()
        wait_s = max(0.0, left if timeout_s is None else min(left, timeout_s))
        answered = self._kind.wait(list(at_work.values()), wait_s)
        overdue = time.monotonic() + 0.1  # a wait may end a little early
        is_over = {slot: w in answered or w.deadline <= overdue for slot, w in at_work.items()}
        return [(slot, self._receive(slot)) for slot in at_work if is_over[slot]]

    def _receive(self, slot: int) -> ChunkResult:
        try:
            return self._workers[slot].receive()
        except NoAnswer as reason:
            self._replace(slot)
            error = f"the worker process of slot {slot}: {reason}"
            return ChunkResult(None, False, executed=0, env_steps=0, done=True, error=error)

    def _replace(self, slot: int) -> None:
        self._workers[slot].close()
        self._workers[slot].end()
        self._workers[slot], self._episodes[slot] = self._kind(SlotEnv, *self._recipe), 0

    def close(self) -> None:
        """End all workers: idle ones in good order, those at work by force."""
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.end()
