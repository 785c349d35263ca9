"""Measure how fast this machine simulates, decides and learns, in a second or two before a run."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from configs.config import TrainConfig
from configs.sections import TaskConfig
from contracts import Observation
from envs.env import Physics, Start
from envs.pool import Pool, make_env
from experiment.first_observations import first_init_state
from experiment.simulators import cores_of_rank
from rl.rollout import threads_that_simulators_leave
from vla.memory import Work, shrink_until_it_fits
from vla.policy import Policy
from vla.tokens import FIRST_ACTION_TOKEN

CHUNKS = 3  # chunks of TIMED_ACTIONS actions that a simulator is timed with
TIMED_ACTIONS = 8
CALLS = 3  # the fastest of so many calls counts, or of fewer if they take ENOUGH_S seconds
ENOUGH_S = 1.0
# On a CPU a timed pass learns from as many decisions as would take so many seconds one by one.
ONE_BY_ONE_S = 2.0


class SimulatorSpeed(NamedTuple):
    """Seconds that one simulator takes when it has the machine to itself."""

    reset_s: float
    step_s: float  # an env step in the physics of training, with its share of rendering
    exact_step_s: float  # an env step in exact physics, which evaluations use


@dataclass(frozen=True)
class Speed:
    """How fast one rank simulates, decides and learns."""

    num_envs: int
    cores: int  # that the rank's simulators share
    chunk_length: int
    simulator: SimulatorSpeed
    decision_s: float  # seconds to decide once for all simulators
    learned_s: float  # seconds of the forward and backward pass of one decision

    def __str__(self) -> str:
        exact = f" ({_ms(self.simulator.exact_step_s)} exact)"
        physics = exact if self.simulator.exact_step_s != self.simulator.step_s else ""
        return (
            f"{_ms(self.decision_s)} to decide for {self.num_envs} simulator(s), {_ms(self.learned_s)} to learn from a "
            f"decision, {_ms(self.simulator.step_s)} an env step of a simulator{physics}"
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def measure_speed(policy: Policy, pool: Pool, observation: Observation, config: TrainConfig) -> Speed:
    """Time an idle simulator, and the policy on an observation.

    `config` holds the settled numbers of simulators and of decisions at a time. Raises BadInput if a single decision
    does not fit into GPU memory.
    """
    num_envs = int(config.simulator.num_envs)
    return Speed(
        num_envs=num_envs,
        cores=cores_of_rank() if config.simulator.simulators == "processes" else num_envs,
        chunk_length=policy.chunk_length,
        simulator=time_simulator(pool, config.task, config.rollout.physics),
        decision_s=time_decision(policy, observation, num_envs, config.model.max_batch),
        learned_s=time_learning(policy, observation, int(config.update.micro_batch_size)),
    )


def time_simulator(pool: Pool, task: TaskConfig, physics: Physics) -> SimulatorSpeed:
    """Time the simulator of slot 0, which must have been built by a first reset, on its first task."""
    reset_s, exact_step_s = _time_episode(pool, task, "exact")
    step_s = exact_step_s
    if physics != "exact":
        _, step_s = _time_episode(pool, task, physics)
    return SimulatorSpeed(reset_s, step_s, exact_step_s)


def _time_episode(pool: Pool, task: TaskConfig, physics: Physics) -> tuple[float, float]:
    """Seconds of a reset, and of an env step of the following chunks, in which the robot stands still."""
    task_id = task.task_ids[0]
    actions = np.zeros((TIMED_ACTIONS, make_env(pool.spec, task_id).action_dim))
    reset_started = time.perf_counter()
    pool.reset(0, task_id, Start(first_init_state(task), physics=physics))
    ((_, result),) = pool.ready()
    reset_ended = time.perf_counter()
    for _ in range(CHUNKS):
        if result.done:
            break
        pool.step(0, actions)
        ((_, result),) = pool.ready()
    chunks_ended = time.perf_counter()
    return reset_ended - reset_started, (chunks_ended - reset_ended) / max(1, result.env_steps)


def time_decision(
    policy: Policy, observation: Observation, num_envs: int, max_batch: int | None = None
) -> float:
    """Seconds to decide once for each of `num_envs` simulators, at most `max_batch` at once."""

    def decide(batch_size: int) -> None:
        policy.act([observation] * batch_size)

    with threads_that_simulators_leave(policy, num_envs):
        batch_size, seconds = _time(policy, decide, min(num_envs, max_batch or num_envs), "rollout")
    return math.ceil(num_envs / batch_size) * seconds


def time_learning(policy: Policy, observation: Observation, micro_batch_size: int) -> float:
    """Seconds of a forward and backward pass for each of its decisions. The parameters do not change."""
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]

    def learn(batch_size: int) -> None:
        logits = policy.chunk_logits([observation] * batch_size)
        tokens = logits.argmax(-1).cpu() + FIRST_ACTION_TOKEN
        policy.token_logprobs(logits, tokens, 1.0).mean().backward()
        if policy.device.type == "cuda":
            torch.cuda.synchronize(policy.device)
        for parameter in parameters:
            parameter.grad = None

    if policy.device.type == "cpu":  # a large network would take minutes, and all of the memory
        _, single_s = _time(policy, learn, 1, "update")
        micro_batch_size = min(micro_batch_size, max(1, int(ONE_BY_ONE_S / single_s)))
    batch_size, seconds = _time(policy, learn, micro_batch_size, "update")
    return seconds / batch_size


def _time(policy: Policy, compute: Callable[[int], None], batch_size: int, work: Work) -> tuple[int, float]:
    """Time compute(batch_size), with a smaller batch if memory runs out. Returns the batch size and the seconds."""
    return shrink_until_it_fits(
        policy.network, batch_size, lambda size: _fastest(policy.device, partial(compute, size)), work
    )


def _fastest(device: torch.device, call: Callable[[], None]) -> float:
    """Seconds of the fastest call. On a GPU the first one is left out, because it records a CUDA graph."""
    if device.type == "cuda":
        call()
    durations: list[float] = []
    while len(durations) < CALLS and sum(durations) < ENOUGH_S:
        started = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started)
    return min(durations)
