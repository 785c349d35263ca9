"""Play whole episodes in all simulators of all ranks at once, for training and for evaluation."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from contracts import Observation, first_line
from envs.machine import usable_cores
from rl.behaviour import Behaviour, decide
from rl.by_task import EpisodesByTask
from rl.randomness import Randomness
from rl.ranks import ALONE, Ranks
from rl.trajectory import Episode, Trajectory
from vla.memory import shrink_batch

if TYPE_CHECKING:
    from envs.env import ChunkResult
    from envs.pool import Pool
    from vla.policy import Policy

MAX_ATTEMPTS = 3  # how often an episode is tried before the run gives up on the simulator
TIMED_PARTS = ("sim", "render", "preprocess", "infer", "wait")


@dataclass
class Rollout:
    """Trajectories in the order of their episodes, and how long collecting them took."""

    trajectories: list[Trajectory]
    times: dict[str, float]  # seconds; `sim`, `render` and `preprocess` are summed over the environments
    wall_s: float  # seconds from start to end
    errors: int  # episodes played again after a simulator fault
    first_decision_s: float = 0.0  # until the first decision: resets, and perhaps building simulators

    @property
    def env_steps(self) -> int:
        return sum(trajectory.env_steps for trajectory in self.trajectories)

    def speed(self) -> str:
        """How long it took, in words: what kept the policy busy, and what it waited for."""
        env_steps_per_s = self.env_steps / self.wall_s
        return (
            f"{len(self.trajectories)} episodes in {self.wall_s:.1f} s, {env_steps_per_s:.0f} env steps/s, "
            f"first decision after {self.first_decision_s:.1f} s; of the time {self.times['infer'] / self.wall_s:.0%} "
            f"deciding, {self.times['wait'] / self.wall_s:.0%} waiting for simulators"
        )


def play_episodes(
    policy: Policy,
    pool: Pool,
    episodes: Iterable[Episode],
    behaviour: Behaviour,
    randomness: Randomness,
    n_steps: int | None = None,
    max_batch: int | None = None,
    ranks: Ranks = ALONE,
    record: Callable[[Episode], bool] = lambda episode: False,
    on_steps: Callable[[int], None] = lambda env_steps: None,
    on_finished: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Rollout:
    """Play `episodes` to their ends. Every rank plays a part of them, and all ranks get all trajectories.

    n_steps: new episodes start until this many env steps are reached over all ranks, then the running ones are finished
    (None: all episodes are played). max_batch: the largest number of observations in one forward pass (None: one per
    slot). record: whether to keep an episode's frames; they stay on the rank that plays it. on_steps: called with the
    env steps of each chunk. on_finished: called with each trajectory as soon as it has ended.

    A simulator fault does not count as a failure of the policy: the episode is played again with the same randomness.
    Raises RuntimeError after MAX_ATTEMPTS, and BadInput when a single observation does not fit into GPU memory.
    """
    plays_all = n_steps is None
    episodes = _episodes_of_rank(episodes, by_group=not plays_all, ranks=ranks)
    schedule = _Schedule(
        episodes=EpisodesByTask(episodes) if plays_all else episodes,
        n_steps=math.inf if n_steps is None else math.ceil(n_steps / ranks.size),
        num_envs=pool.num_slots,
    )
    player = _Player(
        policy=policy,
        pool=pool,
        schedule=schedule,
        behaviour=behaviour,
        randomness=randomness,
        max_batch=max_batch or pool.num_slots,
        record=record,
        on_steps=on_steps,
        on_finished=on_finished,
    )
    rollout = player.play()
    return rollout if ranks.size == 1 else _gather(rollout, ranks)


def _episodes_of_rank(episodes: Iterable[Episode], by_group: bool, ranks: Ranks) -> Iterator[Episode]:
    """The episodes that this rank plays: every `size`-th group, or every `size`-th episode.

    Single episodes divide more evenly, but this is correct only where all of them are played: otherwise some members of
    a group might never be played.
    """
    for episode in episodes:
        index = episode.group if by_group else episode.index
        if index % ranks.size == ranks.rank:
            yield episode


def _gather(rollout: Rollout, ranks: Ranks) -> Rollout:
    """Join the rollouts of all ranks, on every rank. Frames stay on the rank that recorded them."""
    without_frames = [replace(trajectory, frames=[]) for trajectory in rollout.trajectories]
    parts = ranks.gather(replace(rollout, trajectories=without_frames))
    parts[ranks.rank] = rollout
    trajectories = [trajectory for part in parts for trajectory in part.trajectories]
    return Rollout(
        trajectories=in_order(trajectories),
        times={name: sum(part.times[name] for part in parts) / ranks.size for name in rollout.times},
        wall_s=max(part.wall_s for part in parts),
        errors=sum(part.errors for part in parts),
        first_decision_s=max(part.first_decision_s for part in parts),
    )


def in_order(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories sorted by the index of their episodes."""
    return sorted(trajectories, key=lambda trajectory: trajectory.episode.index)


@dataclass
class _Schedule:
    """Decides which episodes start and which are kept, so that about `n_steps` env steps are played.

    The speed of the simulators does not change which episodes are kept. With W environments, a group is admitted if the
    episodes at least W places before its first one hold fewer than `n_steps` env steps. Those may still be running when
    the group starts. So the rule is applied again at the end, with their final lengths, to decide what is kept.
    """

    episodes: Iterator[Episode] | EpisodesByTask
    n_steps: float
    num_envs: int
    lengths: dict[int, int] = field(default_factory=dict)  # env steps so far by episode, in order of start
    episodes_before_group: dict[int, int] = field(default_factory=dict)
    next_episode: Episode | None = None

    def take(self, slot: int) -> Episode | None:
        """The next episode to play in this slot, or None when none may start now."""
        if self.next_episode is None:
            if isinstance(self.episodes, EpisodesByTask):
                self.next_episode = self.episodes.next_for(slot)
            else:
                self.next_episode = next(self.episodes, None)
        episode = self.next_episode
        if episode is None:
            return None
        self.episodes_before_group.setdefault(episode.group, len(self.lengths))
        if not self.admits(episode):
            return None
        self.next_episode = None
        self.lengths[episode.index] = 0
        return episode

    def admits(self, episode: Episode) -> bool:
        """Whether an episode's group belongs to the rollout, by the lengths that are known now."""
        num_decisive = max(0, self.episodes_before_group[episode.group] - self.num_envs + 1)
        return sum(itertools.islice(self.lengths.values(), num_decisive)) < self.n_steps


@dataclass
class _Attempt:
    """One attempt to play an episode in a slot of the pool."""

    trajectory: Trajectory  # the simulator may still be executing its last decision
    tries: int = 1  # attempts at this episode so far, including this one
    started: float = field(default_factory=time.perf_counter)
    observation: Observation | None = None  # while the episode waits for a decision


@dataclass
class _Player:
    """Plays episodes in the slots of a pool, each slot at its own pace."""

    policy: Policy
    pool: Pool
    schedule: _Schedule
    behaviour: Behaviour
    randomness: Randomness
    max_batch: int
    record: Callable[[Episode], bool]
    on_steps: Callable[[int], None]
    on_finished: Callable[[Trajectory], None]
    running: dict[int, _Attempt] = field(default_factory=dict)  # by slot
    # Slots that need a decision; the first has waited longest.
    waiting: list[int] = field(default_factory=list)
    finished: list[Trajectory] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMED_PARTS, 0.0))
    errors: int = 0
    first_decision_s: float | None = None

    def play(self) -> Rollout:
        """Play until no episode is running and none may start."""
        started = time.perf_counter()
        self.start_episodes()
        while self.running:
            self.receive_results()
            if self.waiting:
                self.send_decisions()
                if self.first_decision_s is None:
                    self.first_decision_s = time.perf_counter() - started
            self.start_episodes()
        kept = [trajectory for trajectory in self.finished if self.schedule.admits(trajectory.episode)]
        if self.pool.num_slots == 1:  # this environment runs in our process: waiting includes its work
            working_s = self.times["sim"] + self.times["render"] + self.times["preprocess"]
            self.times["wait"] = max(0.0, self.times["wait"] - working_s)
        wall_s = time.perf_counter() - started
        return Rollout(in_order(kept), self.times, wall_s, self.errors, self.first_decision_s or 0.0)

    def start_episodes(self) -> None:
        """Start an episode in every free slot, as long as the schedule gives any."""
        for slot in range(self.pool.num_slots):
            if slot not in self.running:
                episode = self.schedule.take(slot)
                if episode is not None:
                    self.start(slot, _Attempt(Trajectory(episode)))

    def start(self, slot: int, attempt: _Attempt) -> None:
        """Reset a slot's simulator to the start of an episode."""
        self.running[slot] = attempt
        episode = attempt.trajectory.episode
        self.pool.reset(
            slot,
            episode.task_id,
            episode.init_state_id,
            episode.seed,
            self.record(episode),
            self.behaviour.physics,
            episode.perturbation,
        )

    def receive_results(self) -> None:
        """Take the results of the simulators that have finished. Wait for one only if no episode needs a decision."""
        with self.timed("wait"):
            results = self.pool.ready(timeout_s=0 if self.waiting else None)
        for slot, result in results:
            self.times["sim"] += result.sim_s
            self.times["render"] += result.render_s
            self.times["preprocess"] += result.preprocess_s
            if result.error is not None:
                self.try_again(slot, result.error)
            else:
                self.receive(slot, result)

    def receive(self, slot: int, result: ChunkResult) -> None:
        """Add a chunk's result, or the first observation of an episode, to the trajectory."""
        attempt = self.running[slot]
        trajectory = attempt.trajectory
        self.on_steps(result.executed)
        if trajectory.decisions:
            trajectory.decisions[-1].executed = result.executed
        trajectory.env_steps = result.env_steps
        trajectory.success = result.success
        trajectory.frames.extend(result.frames)
        self.schedule.lengths[trajectory.episode.index] = result.env_steps
        attempt.observation = result.observation
        if result.done:
            trajectory.seconds = time.perf_counter() - attempt.started
            self.finished.append(trajectory)
            self.on_finished(trajectory)
            del self.running[slot]
        else:
            self.waiting.append(slot)

    def try_again(self, slot: int, error: str) -> None:
        """Play an episode from its beginning after a simulator fault. Raises RuntimeError after MAX_ATTEMPTS."""
        attempt = self.running[slot]
        episode = attempt.trajectory.episode
        if attempt.tries == MAX_ATTEMPTS:
            raise RuntimeError(
                f"the simulator failed {MAX_ATTEMPTS} times on {episode.describe()}; last error: {error}"
            )
        self.errors += 1
        self.start(slot, _Attempt(Trajectory(episode, fault=error), attempt.tries + 1))

    def send_decisions(self) -> None:
        """Decide for the slots that have waited longest, as one batch. Reduce the batch when GPU memory runs out."""
        with self.timed("infer"):
            slots = self.waiting[: self.max_batch]
            out_of_memory = self.decide_for(slots)
            if out_of_memory is None:
                del self.waiting[: self.max_batch]
            else:
                self.max_batch = shrink_batch(self.policy, len(slots), out_of_memory, is_update=False)

    def decide_for(self, slots: Sequence[int]) -> str | None:
        """Decide for `slots` and send the actions to their simulators.

        Returns None, or the first line of an out-of-memory error: the exception itself would keep the tensors of the
        failed pass alive.
        """
        attempts = [self.running[slot] for slot in slots]
        observations = [attempt.observation for attempt in attempts if attempt.observation is not None]
        generators = [
            self.randomness.generator(attempt.trajectory.episode, len(attempt.trajectory.decisions))
            for attempt in attempts
        ]
        try:
            with threads_that_simulators_leave(self.policy, self.pool.num_slots):
                decisions, actions = decide(self.policy, observations, generators, self.behaviour)
        except torch.OutOfMemoryError as error:
            return first_line(error)
        for slot, attempt, decision, chunk in zip(slots, attempts, decisions, actions, strict=True):
            if not self.behaviour.keep_observations:
                decision.observation = None
            attempt.trajectory.decisions.append(decision)
            self.pool.step(slot, chunk)
        return None

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
