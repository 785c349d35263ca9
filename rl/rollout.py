"""Play episodes with the teacher, the student or their mixture: used by training and evaluation alike.

All randomness is a function of (seed, what it is for), never of history: a resumed run needs no replay.
"""

from __future__ import annotations

import itertools
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from configs.config import TrainConfig
from contracts import Observation, first_line
from rl.phases import PhaseState, TeacherMode
from rl.trajectory import Decision, Episode, Trajectory
from vla.memory import shrink_batch

if TYPE_CHECKING:
    from envs.pool import Pool
    from vla.policy import Policy

MAX_ATTEMPTS = 3  # how often an episode is tried before the run gives up on the simulator


@dataclass(frozen=True)
class Behaviour:
    """The behaviour policy: who decides, and what is recorded about it."""

    epsilon: float  # probability that the teacher makes a decision
    temperature: float  # the student's sampling temperature
    teacher_mode: TeacherMode = "greedy"
    student_mode: Literal["sample", "greedy"] = "sample"
    record_student_logprobs: bool = False  # PPO needs them for every decision, also for the teacher's
    physics: Literal["exact", "fast"] = "exact"  # of the simulators; evaluations leave it exact
    keep_observations: bool = True  # an evaluation of hundreds of episodes would fill the memory with images


def behaviour_in(phase: PhaseState, config: TrainConfig, teacher_mode: TeacherMode) -> Behaviour:
    """Who acts in the rollouts of a phase: teacher, epsilon-mixture, student."""
    return Behaviour(
        phase.epsilon, config.rollout.temperature, teacher_mode,
        record_student_logprobs=not phase.distils, physics=config.rollout.physics,
    )  # fmt: skip


@dataclass(frozen=True)
class Randomness:
    """Names the random stream of a rollout: decision t of an episode draws from (seed, purpose, update, episode, t)."""

    seed: int
    purpose: str
    update: int = 0

    def generator(self, episode: Episode, decision: int) -> torch.Generator:
        return torch_generator(self.seed, self.purpose, self.update, episode.index, decision)


def seed_sequence(seed: int, purpose: str, *counters: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *counters))


def torch_generator(seed: int, purpose: str, *counters: int) -> torch.Generator:
    """An independent torch CPU generator for each (seed, purpose, counters)."""
    state = seed_sequence(seed, purpose, *counters).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) & (2**63 - 1))


@dataclass
class Rollout:
    """Trajectories in the order of their episodes, and what collecting them cost."""

    trajectories: list[Trajectory]
    times: dict[str, float]  # seconds; `sim`, `render` and `preprocess` are summed over the environments
    wall_s: float
    errors: int  # episodes played again after a simulator fault

    @property
    def env_steps(self) -> int:
        return sum(t.env_steps for t in self.trajectories)


@dataclass
class _Running:
    """An attempt at an episode in a slot of the pool."""

    trajectory: Trajectory  # its last decision may be under way in the simulator
    attempt: int = 1
    started: float = field(default_factory=time.perf_counter)
    observation: Observation | None = None  # while the episode waits for a decision


class _Schedule:
    """Hands out episodes until `n_steps` env steps are reached (None: all of them), a set that timing does not change.

    With W environments a group is admitted when the episodes that come at least W places before its first one hold
    fewer than `n_steps` env steps. While they run, that may change: the final lengths decide what is kept.
    """

    def __init__(self, episodes: Iterable[Episode], n_steps: int | None, num_envs: int):
        self.rest = iter(episodes)
        self.n_steps, self.num_envs = math.inf if n_steps is None else n_steps, num_envs
        self.lengths: dict[int, int] = {}  # episode index -> env steps so far, in the order of the episodes
        self.first_of_group: dict[int, int] = {}  # group -> how many episodes come before it
        self.next: Episode | None = None

    def take(self) -> Episode | None:
        """The next episode to play, or None when nothing may start now."""
        episode = self.next = self.next or next(self.rest, None)
        if episode is None:
            return None
        self.first_of_group.setdefault(episode.group, len(self.lengths))
        if not self.admits(episode):
            return None
        self.next = None
        self.lengths[episode.index] = 0
        return episode

    def admits(self, episode: Episode) -> bool:
        decisive = max(0, self.first_of_group[episode.group] - self.num_envs + 1)
        return sum(itertools.islice(self.lengths.values(), decisive)) < self.n_steps


def rollout(
    policy: Policy, pool: Pool, episodes: Iterable[Episode], behaviour: Behaviour, randomness: Randomness,
    n_steps: int | None = None, max_batch: int | None = None,
    record: Callable[[Episode], bool] = lambda _: False,
    on_steps: Callable[[int], None] = lambda _: None,
    on_finished: Callable[[Trajectory], None] = lambda _: None,
) -> Rollout:  # fmt: skip
    """Play `episodes` to their ends and return their trajectories in order; `on_finished` gets each as it ends.

    Those that wait are decided together, at most `max_batch` of them (None: all). With `n_steps` new episodes start
    until that many env steps are reached, and running ones finish. A simulator fault is never a failure: the episode is
    played again with the same randomness; after MAX_ATTEMPTS the run stops (RuntimeError).
    """
    started = time.perf_counter()
    schedule = _Schedule(episodes, n_steps, pool.num_slots)
    running: dict[int, _Running] = {}  # by slot
    waiting: list[int] = []  # slots that need a decision, the first to be ready first
    finished: list[Trajectory] = []
    times = dict.fromkeys(("sim", "render", "preprocess", "infer", "wait"), 0.0)
    max_batch, errors = max_batch or pool.num_slots, 0

    def reset(slot: int, episode: Episode) -> None:
        start = episode.task_id, episode.init_state_id, episode.seed
        pool.reset(slot, *start, record(episode), behaviour.physics, episode.perturbation)

    while True:
        for slot in range(pool.num_slots):
            if slot not in running and (episode := schedule.take()) is not None:
                running[slot] = _Running(Trajectory(episode))
                reset(slot, episode)
        if not running:
            break

        waited_from = time.perf_counter()
        results = pool.ready(timeout_s=0 if waiting else None)
        times["wait"] += time.perf_counter() - waited_from
        for slot, result in results:
            times["sim"] += result.sim_s
            times["render"] += result.render_s
            times["preprocess"] += result.preprocess_s
            now, trajectory = running[slot], running[slot].trajectory
            episode = trajectory.episode
            if result.error is not None:
                if now.attempt == MAX_ATTEMPTS:
                    what = f"the simulator failed {MAX_ATTEMPTS} times on {episode.describe()}"
                    raise RuntimeError(f"{what}; last error: {result.error}")
                errors += 1
                running[slot] = _Running(Trajectory(episode, fault=result.error), now.attempt + 1)
                reset(slot, episode)
                continue
            on_steps(result.executed)
            if trajectory.decisions:
                trajectory.decisions[-1].executed = result.executed
            trajectory.env_steps, trajectory.success = result.env_steps, result.success
            trajectory.frames.extend(result.frames)
            schedule.lengths[episode.index], now.observation = result.env_steps, result.observation
            if result.done:
                trajectory.seconds = time.perf_counter() - now.started
                finished.append(trajectory)
                on_finished(trajectory)
                del running[slot]
            else:
                waiting.append(slot)

        if waiting:
            decided_from = time.perf_counter()
            served = {slot: running[slot] for slot in waiting[:max_batch]}
            out_of_memory = _serve(policy, pool, served, behaviour, randomness)
            if out_of_memory is None:
                del waiting[:max_batch]
            else:
                max_batch = shrink_batch(policy, len(served), out_of_memory, is_update=False)
            times["infer"] += time.perf_counter() - decided_from

    if pool.num_slots == 1:  # an inline environment works while we wait for it
        times["wait"] = max(0.0, times["wait"] - times["sim"] - times["render"] - times["preprocess"])
    kept = sorted((t for t in finished if schedule.admits(t.episode)), key=lambda t: t.episode.index)
    return Rollout(kept, times, time.perf_counter() - started, errors)


def _serve(
    policy: Policy, pool: Pool, served: dict[int, _Running], behaviour: Behaviour, randomness: Randomness
) -> str | None:
    """Decide for waiting environments as one batch and send them on; or, out of memory, return what that said."""
    episodes = list(served.values())
    generators = [
        randomness.generator(now.trajectory.episode, len(now.trajectory.decisions)) for now in episodes
    ]
    observations = [now.observation for now in episodes if now.observation is not None]
    threads = torch.get_num_threads()
    if policy.device.type == "cpu" and pool.num_slots > 1:
        # The network's threads wait for one another actively: it keeps to the cores that simulators leave.
        torch.set_num_threads(max(1, min(threads, (os.cpu_count() or 1) - pool.num_slots)))
    try:
        decisions, actions = decide(policy, observations, generators, behaviour)
    except torch.OutOfMemoryError as error:
        return first_line(error)
    finally:
        torch.set_num_threads(threads)
    for (slot, now), decision, chunk in zip(served.items(), decisions, actions, strict=True):
        if not behaviour.keep_observations:
            decision.observation = None
        now.trajectory.decisions.append(decision)
        pool.step(slot, chunk)
    return None


def decide(
    policy: Policy,
    observations: Sequence[Observation],
    generators: Sequence[torch.Generator],
    behaviour: Behaviour,
) -> tuple[list[Decision], np.ndarray]:
    """One decision per observation, and the env-ready actions (B, chunk, action_dim).

    Each first draws who makes it (when epsilon leaves that open), then the student's tokens, from its own generator.
    """
    epsilon, is_open = behaviour.epsilon, 0 < behaviour.epsilon < 1
    by_teacher = [
        torch.rand((), generator=g).item() < epsilon if is_open else epsilon == 1 for g in generators
    ]
    decisions: dict[int, Decision] = {}  # by row of `observations`, as `actions`
    actions: dict[int, np.ndarray] = {}

    if rows := [i for i, teacher in enumerate(by_teacher) if teacher]:
        acted = policy.act_as_teacher([observations[i] for i in rows], behaviour.teacher_mode)
        for row, i in enumerate(rows):
            decisions[i] = Decision(observations[i], acted.tokens[row], by_teacher=True)
            actions[i] = acted.actions[row]
    if rows := [i for i, teacher in enumerate(by_teacher) if not teacher]:
        seen, draws = [observations[i] for i in rows], [generators[i] for i in rows]
        acted = policy.act(seen, behaviour.student_mode, behaviour.temperature, draws)
        for row, i in enumerate(rows):
            decisions[i] = Decision(
                observations[i], acted.tokens[row], False, student_logprobs=acted.logprobs[row]
            )
            actions[i] = acted.actions[row]
    if rows := [i for i, teacher in enumerate(by_teacher) if teacher and behaviour.record_student_logprobs]:
        with torch.no_grad():
            logits = policy.chunk_logits([observations[i] for i in rows])
            tokens = torch.stack([decisions[i].tokens for i in rows]).to(logits.device)
            logprobs = policy.token_logprobs(logits, tokens, behaviour.temperature).cpu()
        for row, i in enumerate(rows):
            decisions[i].student_logprobs = logprobs[row]
    return [decisions[i] for i in range(len(observations))], np.stack(
        [actions[i] for i in range(len(observations))]
    )
