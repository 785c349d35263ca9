"""Play episodes in all simulators at once, each at its own pace; play an episode again after a simulator fault."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from contracts import Observation
from envs.env import Start
from envs.machine import usable_cores
from rl.behaviour import Behaviour, decide
from rl.episode_order import EpisodeQueue
from rl.randomness import Randomness
from rl.trajectory import Decision, Episode, Trajectory
from vla.pass_sizes import shrink_until_it_fits

if TYPE_CHECKING:
    from envs.env import ChunkResult
    from envs.pool import Pool
    from vla.policy import Policy

log = logging.getLogger(__name__)
MAX_ATTEMPTS = 3  # how often an episode is tried before it is left out
MAX_BAD_STARTS = 5  # after so many starts in a row that cannot be played the simulator counts as broken
MAX_LEFT_OUT = 20  # episodes in a row, where there are fewer starts than that
TIMED_PARTS = ("sim", "render", "preprocess", "infer", "wait")


@dataclass
class _Attempt:
    """One attempt to play an episode in a slot of the pool."""

    trajectory: Trajectory  # the simulator may still be executing its last decision
    tries: int = 1  # attempts at this episode so far, including this one
    started: float = field(default_factory=time.perf_counter)
    observation: Observation | None = None  # while the episode waits for a decision


@dataclass
class EpisodePlayer:
    """Plays episodes in the slots of a pool, each slot at its own pace."""

    policy: Policy
    pool: Pool
    behaviour: Behaviour
    randomness: Randomness
    max_batch: int | None = None  # largest number of observations in one forward pass; None: one per slot
    filmed: Container[Episode] = ()  # episodes whose frames are kept
    # Of the present or the last call of `play`:
    times: dict[str, float] = field(init=False, default_factory=dict)  # seconds, see `Rollout`
    errors: int = field(init=False, default=0)  # episodes played again after a simulator fault
    # Episodes left out since the last one that was played to its end.
    left_out: list[Episode] = field(init=False, default_factory=list)
    running: dict[int, _Attempt] = field(init=False, default_factory=dict)  # by slot
    # Slots that need a decision; the first has waited longest.
    waiting: list[int] = field(init=False, default_factory=list)

    def play(self, queue: EpisodeQueue) -> Iterator[Trajectory]:
        """Play until no episode is running and none may start. Yields each trajectory as soon as it has ended.

        A simulator fault does not count as a failure of the policy: the episode is played again with the same
        randomness, and left out after MAX_ATTEMPTS. Raises RuntimeError if the simulator fails wherever it starts, and
        BadInput when a single observation does not fit into GPU memory.
        """
        self.times = dict.fromkeys(TIMED_PARTS, 0.0)
        self.errors = 0
        self.left_out = []
        self.start_episodes(queue)
        while self.running:
            yield from self.receive_results(queue)
            if self.waiting:
                self.send_decisions()
            self.start_episodes(queue)

    def start_episodes(self, queue: EpisodeQueue) -> None:
        """Start an episode in every free slot, as long as the queue gives any."""
        for slot in range(self.pool.num_slots):
            if slot not in self.running:
                episode = queue.next_for(slot)
                if episode is not None:
                    self.start(slot, _Attempt(Trajectory(episode)))

    def start(self, slot: int, attempt: _Attempt) -> None:
        """Reset a slot's simulator to the start of an episode."""
        self.running[slot] = attempt
        episode = attempt.trajectory.episode
        start = Start(episode.init_state_id, episode.seed, episode in self.filmed, self.behaviour.physics)
        self.pool.reset(slot, episode.task_id, start)

    def receive_results(self, queue: EpisodeQueue) -> Iterator[Trajectory]:
        """Take the results of the simulators that have finished, and yield the trajectories that have ended.

        Waits for a simulator only if no episode needs a decision.
        """
        with self.timed("wait"):
            results = self.pool.ready(timeout_s=0 if self.waiting else None)
        for slot, result in results:
            self.times["sim"] += result.sim_s
            self.times["render"] += result.render_s
            self.times["preprocess"] += result.preprocess_s
            if result.error is not None:
                queue.count(self.running[slot].trajectory.episode, 0)
                self.try_again(slot, result.error)
                continue
            trajectory = self.receive(slot, result)
            queue.count(trajectory.episode, result.env_steps)
            if result.done:
                del self.running[slot]
                self.left_out = []
                yield trajectory
            else:
                self.waiting.append(slot)

    def receive(self, slot: int, result: ChunkResult) -> Trajectory:
        """Add a chunk's result, or the first observation of an episode, to the trajectory, which is returned."""
        attempt = self.running[slot]
        trajectory = attempt.trajectory
        if trajectory.decisions:
            trajectory.decisions[-1].executed = result.executed
        trajectory.env_steps = result.env_steps
        trajectory.success = result.success
        trajectory.frames.extend(result.frames)
        trajectory.seconds = time.perf_counter() - attempt.started
        attempt.observation = result.observation
        return trajectory

    def try_again(self, slot: int, error: str) -> None:
        """Play an episode from its beginning after a simulator fault, or leave it out after MAX_ATTEMPTS."""
        attempt = self.running[slot]
        episode = attempt.trajectory.episode
        if attempt.tries < MAX_ATTEMPTS:
            self.errors += 1
            self.start(slot, _Attempt(Trajectory(episode, fault=error), attempt.tries + 1))
            return
        del self.running[slot]
        self.left_out.append(episode)
        log.warning(
            "%s is left out: the simulator failed %d times (%s)", episode.describe(), MAX_ATTEMPTS, error
        )
        starts = {(other.task_id, other.init_state_id, other.seed) for other in self.left_out}
        if len(starts) == MAX_BAD_STARTS or len(self.left_out) == MAX_LEFT_OUT:
            raise RuntimeError(
                f"the simulator failed {MAX_ATTEMPTS} times on each of {len(starts)} starts in a row: {error}"
            )

    def send_decisions(self) -> None:
        """Decide for the slots that have waited longest, as one batch, and send the actions to their simulators."""
        with self.timed("infer"):
            batch_size = min(self.max_batch or self.pool.num_slots, len(self.waiting))
            size_that_fits, (decisions, actions) = shrink_until_it_fits(
                self.policy.network, batch_size, self.decide, learns=False
            )
        slots = self.waiting[:size_that_fits]
        del self.waiting[:size_that_fits]
        for slot, decision, chunk in zip(slots, decisions, actions, strict=True):
            if not self.behaviour.keep_observations:
                decision.observation = None
                decision.kept = None
            self.running[slot].trajectory.decisions.append(decision)
            self.pool.step(slot, chunk)

    def decide(self, batch_size: int) -> tuple[list[Decision], np.ndarray]:
        """Decisions and actions (B, chunk, action_dim) for the first `batch_size` waiting slots."""
        attempts = [self.running[slot] for slot in self.waiting[:batch_size]]
        observations = [attempt.observation for attempt in attempts if attempt.observation is not None]
        assert len(observations) == len(attempts)
        generators = [
            self.randomness.generator(attempt.trajectory.episode, len(attempt.trajectory.decisions))
            for attempt in attempts
        ]
        epsilons = [
            self.behaviour.epsilon_at(attempt.trajectory.episode, attempt.trajectory.env_steps)
            for attempt in attempts
        ]
        with threads_that_simulators_leave(self.policy, self.pool.num_slots):
            return decide(self.policy, observations, generators, epsilons, self.behaviour)

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to `times`."""
        started = time.perf_counter()
        yield
        self.times[part] += time.perf_counter() - started


@contextlib.contextmanager
def threads_that_simulators_leave(policy: Policy, num_envs: int) -> Iterator[None]:
    """Within this block, torch uses only the CPU cores that `num_envs` simulators leave free (for a policy on the CPU).

    torch's threads wait for one another in busy loops, so with more threads than free cores everything becomes slow.
    """
    threads = torch.get_num_threads()
    if policy.device.type == "cpu" and num_envs > 1:
        free_cores = usable_cores() - num_envs
        torch.set_num_threads(max(1, min(threads, free_cores)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
