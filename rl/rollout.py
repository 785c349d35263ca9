"""Play episodes with the teacher, the student or their mixture: used by training and evaluation alike.

All randomness is a function of (seed, what it is for), never of history: a resumed run needs no replay.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from configs.config import TrainConfig
from contracts import BadInput, Observation, first_line
from rl.phases import Phase, PhaseState, TeacherMode
from rl.trajectory import Decision, Episode, Trajectory

if TYPE_CHECKING:
    from envs.libero import ChunkResult
    from envs.pool import Pool
    from vla.policy import Policy

log = logging.getLogger("train")

NUM_SAMPLES = 8
MAX_ATTEMPTS = 3  # how often an episode is tried before the run gives up on the simulator
RENDERING = "lower --num-envs (simulators may render on the GPU), or close other programs on it"
NO_ROOM_TO_ACT = f"a decision with --max-batch 1: {RENDERING}"
NO_ROOM_TO_LEARN = (
    f"an update with --micro-batch-size 1 and --gradient-checkpointing on: raise --memory-budget, {RENDERING}"
)


@dataclass(frozen=True)
class Behaviour:
    """The behaviour policy: who decides, and what is recorded about it."""

    epsilon: float  # probability that the teacher makes a decision
    temperature: float  # the student's sampling temperature
    teacher_mode: TeacherMode = "greedy"
    student_mode: Literal["sample", "greedy"] = "sample"
    record_student_logprobs: bool = False  # PPO needs them for every decision, also for the teacher's
    record_teacher_match: bool = False  # behaviour importance needs the teacher's chunk for every decision
    keep_observations: bool = True  # an evaluation of hundreds of episodes would fill the memory with images


def behaviour_in(phase: PhaseState, config: TrainConfig, teacher_mode: TeacherMode) -> Behaviour:
    """Who acts in the rollouts of a phase: teacher, epsilon-mixture, student."""
    return Behaviour(
        epsilon=phase.epsilon,
        temperature=config.rollout.temperature,
        teacher_mode=teacher_mode,
        record_student_logprobs=phase.phase is not Phase.WARMUP,
        record_teacher_match=phase.phase is Phase.TRANSITION and config.phases.importance == "behaviour",
    )


@dataclass(frozen=True)
class Batching:
    """Which of the environments that wait for a decision are served together."""

    max_size: int | None = None  # None: all that are ready
    patience_s: float = 0.0  # how long a batch that is not full waits for environments about to be ready


ALL_READY = Batching()


def batching_of(config: TrainConfig) -> Batching:
    return Batching(config.model.max_batch, config.rollout.patience_ms / 1000)


@dataclass(frozen=True)
class Randomness:
    """Names the random stream of a rollout: decision t of an episode draws from (seed, purpose, update, episode, t)."""

    seed: int
    purpose: str
    update: int = 0

    def generator(self, episode: Episode, decision: int) -> torch.Generator:
        return torch_generator(self.seed, self.purpose, self.update, episode.index, decision)


def numpy_generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """An independent numpy generator for each (seed, purpose, counters)."""
    return np.random.default_rng(_seed_sequence(seed, purpose, counters))


def torch_generator(seed: int, purpose: str, *counters: int) -> torch.Generator:
    """An independent torch CPU generator for each (seed, purpose, counters)."""
    entropy = int(_seed_sequence(seed, purpose, counters).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(entropy & (2**63 - 1))


def _seed_sequence(seed: int, purpose: str, counters: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *counters))


@dataclass
class Rollout:
    """The trajectories of a rollout in the order of their episodes, and what collecting them cost."""

    trajectories: list[Trajectory]
    times: dict[str, float]  # seconds; `sim`, `render` and `preprocess` are summed over the environments
    wall_s: float
    errors: int  # episodes played again after a simulator fault

    @property
    def env_steps(self) -> int:
        return sum(t.env_steps for t in self.trajectories)

    @property
    def samples(self) -> list[Observation]:
        """A few observations, evenly spread over the rollout."""
        observations = [d.observation for t in self.trajectories for d in t.decisions if d.observation is not None]
        return observations[:: max(1, len(observations) // NUM_SAMPLES)][:NUM_SAMPLES]


@dataclass
class _Running:
    """An episode in a slot of the pool."""

    trajectory: Trajectory
    attempt: int
    started: float = field(default_factory=time.perf_counter)
    observation: Observation | None = None  # while the episode waits for a decision
    decision: Decision | None = None  # under way in the simulator


@dataclass
class _Schedule:
    """Hands out episodes until `n_steps` env steps are reached (None: all of them), a set that timing does not change.

    With W environments a group may start when the episodes that come at least W places before its first one hold fewer
    than `n_steps` env steps. Running episodes count with the steps they have so far, so a group can start that the
    final lengths rule out; `admitted` drops it.
    """

    episodes: Iterable[Episode]
    n_steps: int | None
    num_envs: int
    lengths: dict[int, int] = field(default_factory=dict)  # episode index -> env steps so far
    places: dict[int, int] = field(default_factory=dict)  # episode index -> episodes handed out before it
    first_of_group: dict[int, int] = field(default_factory=dict)  # group -> place of its first episode
    again: deque[tuple[Episode, int]] = field(default_factory=deque)  # after a fault: (episode, attempt)
    _next: Episode | None = None

    def __post_init__(self) -> None:
        self._rest = iter(self.episodes)

    def take(self) -> tuple[Episode, int] | None:
        """The next episode to play and the number of this attempt, or None when nothing may start now."""
        if self.again:
            return self.again.popleft()
        self._next = episode = self._next or next(self._rest, None)
        if episode is None:
            return None
        place = self.places.setdefault(episode.index, len(self.places))
        self.first_of_group.setdefault(episode.group, place)
        if not self.admitted(episode):
            return None
        self._next = None
        return episode, 1

    def admitted(self, episode: Episode) -> bool:
        if self.n_steps is None:
            return True
        decisive = self.first_of_group[episode.group] - self.num_envs + 1
        return sum(steps for index, steps in self.lengths.items() if self.places[index] < decisive) < self.n_steps

    def retry(self, episode: Episode, attempt: int, error: str) -> None:
        """Play an episode again after a fault, whose last attempt was that one."""
        if attempt >= MAX_ATTEMPTS:
            raise RuntimeError(f"the simulator failed {attempt} times on {episode.describe()}; last error: {error}")
        self.again.append((episode, attempt + 1))


def rollout(
    policy: Policy,
    pool: Pool,
    episodes: Iterable[Episode],
    behaviour: Behaviour,
    randomness: Randomness,
    n_steps: int | None = None,
    batching: Batching = ALL_READY,
    record: Callable[[Episode], bool] = lambda _: False,
    on_steps: Callable[[int], None] = lambda _: None,
    on_finished: Callable[[Trajectory], None] = lambda _: None,
) -> Rollout:
    """Play `episodes` to their ends and return their trajectories in order; `on_finished` gets each as it ends.

    With `n_steps` new episodes start until that many env steps are reached and running ones finish: a rollout holds
    whole trajectories only. Environments are served as they become ready. A simulator fault is never a failure: the
    episode is played again with the same randomness, and after MAX_ATTEMPTS the run stops (RuntimeError).
    """
    started = time.perf_counter()
    schedule = _Schedule(episodes, n_steps, pool.num_slots)
    running: dict[int, _Running] = {}
    waiting: dict[int, _Running] = {}  # those of them that need a decision, the first to be ready first
    finished: list[Trajectory] = []
    faults: dict[int, str] = {}  # episode index -> the last fault that it was played again for
    times = dict.fromkeys(("sim", "render", "preprocess", "infer", "wait"), 0.0)
    max_size, errors = batching.max_size, 0

    while True:
        for slot in range(pool.num_slots):
            if slot not in running and (taken := schedule.take()) is not None:
                episode, attempt = taken
                running[slot] = _Running(Trajectory(episode), attempt)
                pool.reset(slot, episode.task_id, episode.init_state_id, record=record(episode))
        if not running:
            break

        waited_from = time.perf_counter()
        results = _next_results(pool, len(waiting), min(len(running), max_size or len(running)), batching.patience_s)
        times["wait"] += time.perf_counter() - waited_from
        for slot, result in results:
            times["sim"] += result.sim_s
            times["render"] += result.render_s
            times["preprocess"] += result.preprocess_s
            now = running[slot]
            trajectory = now.trajectory
            if result.error is not None:
                errors += 1
                faults[trajectory.episode.index] = result.error
                del running[slot]
                schedule.retry(trajectory.episode, now.attempt, result.error)
                continue
            on_steps(result.executed)
            _absorb(now, result, behaviour.keep_observations)
            schedule.lengths[trajectory.episode.index] = result.env_steps
            if result.done:
                trajectory.seconds = time.perf_counter() - now.started
                trajectory.fault = faults.get(trajectory.episode.index)
                finished.append(trajectory)
                on_finished(trajectory)
                del running[slot]
            else:
                waiting[slot] = now

        if waiting:
            decided_from = time.perf_counter()
            served = {slot: waiting.pop(slot) for slot in list(waiting)[:max_size]}
            with _cores_for_simulators(policy.device, pool.num_slots):
                out_of_memory = _serve(policy, pool, served, behaviour, randomness)
            if out_of_memory is not None:
                waiting = served | waiting
                max_size = fewer_at_once(policy, len(served), out_of_memory, learning=False)
            times["infer"] += time.perf_counter() - decided_from

    if pool.num_slots == 1:  # an inline environment works while we wait for it
        times["wait"] = max(0.0, times["wait"] - times["sim"] - times["render"] - times["preprocess"])
    kept = sorted((t for t in finished if schedule.admitted(t.episode)), key=lambda t: t.episode.index)
    return Rollout(kept, times, time.perf_counter() - started, errors)


def _next_results(pool: Pool, waiting: int, full: int, patience_s: float) -> list[tuple[int, ChunkResult]]:
    """What the simulators have done: at least one result, unless environments wait for a decision already.

    With patience, also what they do within that time, up to a full batch.
    """
    results = list(pool.ready(timeout_s=0 if waiting else None))
    give_up = time.perf_counter() + patience_s
    while waiting + len(results) < full and (left := give_up - time.perf_counter()) > 0:
        if not (more := pool.ready(timeout_s=left)):
            break
        results += more
    return results


def _absorb(now: _Running, result: ChunkResult, keep_observations: bool) -> None:
    """Write what the simulator did into the trajectory."""
    trajectory = now.trajectory
    if now.decision is not None:
        now.decision.executed = result.executed
        if not keep_observations and not trajectory.frames:  # a filmed episode is shown with all that was seen
            now.decision.observation = None
        trajectory.decisions.append(now.decision)
        now.decision = None
    trajectory.env_steps = result.env_steps
    trajectory.success = result.success
    trajectory.frames.extend(result.frames)
    now.observation = result.observation


def _serve(
    policy: Policy, pool: Pool, served: dict[int, _Running], behaviour: Behaviour, randomness: Randomness
) -> str | None:
    """Decide for waiting environments as one batch and send them on; or, out of memory, return what that said."""
    episodes = list(served.values())
    generators = [randomness.generator(now.trajectory.episode, len(now.trajectory.decisions)) for now in episodes]
    observations = [now.observation for now in episodes if now.observation is not None]
    try:
        decisions, actions = decide(policy, observations, generators, behaviour)
    except torch.OutOfMemoryError as error:
        return first_line(error)
    for (slot, now), decision, chunk in zip(served.items(), decisions, actions, strict=True):
        now.decision, now.observation = decision, None
        pool.step(slot, chunk)
    return None


def decide(
    policy: Policy, observations: Sequence[Observation], generators: Sequence[torch.Generator], behaviour: Behaviour
) -> tuple[list[Decision], np.ndarray]:
    """One decision per observation, and the env-ready actions (B, chunk, 7).

    Each decision first draws who makes it (when epsilon leaves that open), then the student's tokens, all from its
    own generator.
    """
    by_teacher = [_teacher_decides(behaviour.epsilon, generator) for generator in generators]
    tokens: dict[int, Tensor] = {}  # all four by row of `observations`
    actions: dict[int, np.ndarray] = {}
    logprobs: dict[int, Tensor] = {}
    teacher_tokens: dict[int, Tensor] = {}

    if rows := [i for i, teacher in enumerate(by_teacher) if teacher or behaviour.record_teacher_match]:
        with policy.teacher():
            acted = policy.act([observations[i] for i in rows], mode=behaviour.teacher_mode)
        for row, i in enumerate(rows):
            teacher_tokens[i] = acted.tokens[row]
            if by_teacher[i]:
                tokens[i], actions[i] = acted.tokens[row], acted.actions[row]
    if rows := [i for i, teacher in enumerate(by_teacher) if not teacher]:
        acted = policy.act(
            [observations[i] for i in rows],
            mode=behaviour.student_mode,
            temperature=behaviour.temperature,
            generators=[generators[i] for i in rows] if behaviour.student_mode == "sample" else None,
        )
        for row, i in enumerate(rows):
            tokens[i], actions[i], logprobs[i] = acted.tokens[row], acted.actions[row], acted.logprobs[row]
    if rows := [i for i, teacher in enumerate(by_teacher) if teacher and behaviour.record_student_logprobs]:
        with torch.no_grad():
            logits = policy.chunk_logits([observations[i] for i in rows])
            chunks = torch.stack([tokens[i] for i in rows]).to(logits.device)
            scores = policy.token_logprobs(logits, chunks, behaviour.temperature).cpu()
        logprobs |= dict(zip(rows, scores, strict=True))

    decisions = [
        Decision(
            observation=observations[i],
            tokens=tokens[i],
            by_teacher=by_teacher[i],
            student_logprobs=logprobs.get(i),
            matches_teacher=tokens[i] == teacher_tokens[i] if behaviour.record_teacher_match else None,
        )
        for i in range(len(observations))
    ]
    return decisions, np.stack([actions[i] for i in range(len(observations))])


def _teacher_decides(epsilon: float, generator: torch.Generator) -> bool:
    if epsilon in (0.0, 1.0):
        return epsilon == 1.0
    return torch.rand((), generator=generator).item() < epsilon


def fewer_at_once(policy: Policy, tried: int, reason: str, learning: bool) -> int:
    """How many decisions to send through the network at once after `tried` of them did not fit the GPU's memory.

    Half of them; where one did not fit and is learnt from, one with all activations recomputed. It changes no result
    beyond rounding. Raises BadInput at the end. Each update and rollout begins with the most again: the memory that was
    missing may have been another program's.
    """
    torch.cuda.empty_cache()  # nothing on a CPU
    if tried > 1 or (learning and policy.recompute_everything()):
        how = f"{tried // 2} decisions at once" if tried > 1 else "all activations recomputed"
        log.warning("out of GPU memory (%s); the run goes on with %s", reason, how)
        return max(1, tried // 2)
    raise BadInput(f"out of GPU memory ({reason}) in {NO_ROOM_TO_LEARN if learning else NO_ROOM_TO_ACT}")


@contextmanager
def _cores_for_simulators(device: torch.device, num_envs: int) -> Iterator[None]:
    """While simulators run in processes of their own, a network on the CPU keeps to the cores that they leave.

    Its threads wait for one another actively; on cores that are taken, that is most of what they do.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu" and num_envs > 1:
        torch.set_num_threads(max(1, min(threads, (os.cpu_count() or 1) - num_envs)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
