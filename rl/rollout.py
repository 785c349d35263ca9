"""Play episodes with the teacher, the student or their mixture: used by training and evaluation alike."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from configs.config import RolloutConfig, TrainConfig
from rl.contracts import Observation, Policy, Pool, StepResult, TeacherMode
from rl.cores import cores_for_simulators
from rl.out_of_memory import AtOnce, first_line
from rl.phases import Phase, PhaseState
from rl.randomness import torch_generator
from rl.trajectory import Decision, Episode, Trajectory

NUM_SAMPLES = 8
MAX_ATTEMPTS = 3  # how often an episode is tried before the run gives up on the simulator


@dataclass(frozen=True)
class Acting:
    """Who decides, and what is recorded about it."""

    epsilon: float  # probability that the teacher makes a decision
    temperature: float  # the student's sampling temperature
    teacher_mode: TeacherMode = "greedy"
    student_mode: Literal["sample", "greedy"] = "sample"
    record_student_logprobs: bool = False  # PPO needs them for every decision, also for the teacher's
    record_teacher_match: bool = False  # behaviour importance needs the teacher's chunk for every decision
    keep_observations: bool = True  # an evaluation of hundreds of episodes would fill the memory with images


def acting_in(phase: PhaseState, config: TrainConfig, teacher_mode: TeacherMode) -> Acting:
    """Who acts in the rollouts of a phase (SPEC section 3): teacher, epsilon-mixture, student."""
    return Acting(
        epsilon=phase.epsilon,
        temperature=config.rollout.temperature,
        teacher_mode=teacher_mode,
        record_student_logprobs=phase.phase is not Phase.WARMUP,
        record_teacher_match=phase.phase is Phase.TRANSITION and config.phases.importance == "behaviour",
    )


@dataclass(frozen=True)
class Randomness:
    """Names the random stream of a rollout: decision t of an episode draws from (seed, purpose, update, episode, t)."""

    seed: int
    purpose: str
    update: int = 0

    def generator(self, episode: Episode, decision: int) -> torch.Generator:
        return torch_generator(self.seed, self.purpose, self.update, episode.index, decision)


@dataclass
class Collected:
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
        observations = [d.observation for t in self.trajectories for d in t.decisions]
        return observations[:: max(1, len(observations) // NUM_SAMPLES)][:NUM_SAMPLES]


@dataclass(frozen=True)
class Batching:
    """Which of the environments that wait for a decision are served together."""

    max_size: int | None = None  # None: all that are ready
    patience_s: float = 0.0  # how long a batch that is not full waits for environments about to be ready

    def lowered(self, policy: Any, tried: int, reason: str) -> Batching:
        """After `tried` were too many for the memory: half of them. Raises BadInput at 1."""
        at_once = AtOnce(tried, learning=False)
        at_once.lower(policy, reason)
        return replace(self, max_size=at_once.size)


ALL_READY = Batching()


def batching_of(config: RolloutConfig) -> Batching:
    return Batching(config.max_batch, config.patience_ms / 1000)


@dataclass
class _Running:
    trajectory: Trajectory
    attempt: int
    started: float = field(default_factory=time.perf_counter)
    observation: Any = None  # an Observation while the episode waits for a decision
    decision: Decision | None = None  # under way in the simulator


@dataclass
class _Schedule:
    """Hands out episodes until `n_steps` env steps are reached (None: all of them).

    The set of episodes must not depend on timing, or a run with several environments could not be repeated. With W
    environments a group may start when the episodes that come at least W places before its first one hold fewer than
    `n_steps` env steps. Running episodes count with the steps they have so far, so a group can start that the final
    lengths rule out; `admitted` drops it.
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
        if self._next is None:
            self._next = next(self._rest, None)
        episode = self._next
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


def collect(
    policy: Policy,
    pool: Pool,
    episodes: Iterable[Episode],
    acting: Acting,
    randomness: Randomness,
    n_steps: int | None = None,
    batching: Batching = ALL_READY,
    record: Callable[[Episode], bool] = lambda _: False,
    on_steps: Callable[[int], None] = lambda _: None,
    on_finished: Callable[[Trajectory], None] = lambda _: None,
) -> Collected:
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
    errors = 0

    while True:
        for slot in range(pool.num_slots):
            if slot not in running and (taken := schedule.take()) is not None:
                episode, attempt = taken
                running[slot] = _Running(Trajectory(episode), attempt)
                pool.reset(slot, episode.task_id, episode.init_state_id, record=record(episode))
        if not running:
            break

        waited_from = time.perf_counter()
        results = _next_results(pool, len(waiting), len(running), batching)
        times["wait"] += time.perf_counter() - waited_from
        for slot, result in results:
            times["sim"] += result.sim_s
            times["render"] += result.render_s
            times["preprocess"] += result.preprocess_s
            now = running[slot]
            if result.error is not None:
                errors += 1
                faults[now.trajectory.episode.index] = result.error
                del running[slot]
                _play_again(schedule, now, result.error)
                continue
            on_steps(result.executed)
            _absorb(now, result, acting.keep_observations)
            schedule.lengths[now.trajectory.episode.index] = result.env_steps
            if result.done:
                now.trajectory.seconds = time.perf_counter() - now.started
                now.trajectory.fault = faults.get(now.trajectory.episode.index)
                finished.append(now.trajectory)
                on_finished(now.trajectory)
                del running[slot]
            else:
                waiting[slot] = now

        if waiting:
            decided_from = time.perf_counter()
            batch = [(slot, waiting.pop(slot)) for slot in list(waiting)[: batching.max_size]]
            with cores_for_simulators(policy.device, pool.num_slots):
                too_many = _serve(policy, pool, batch, acting, randomness)
            if too_many is not None:
                waiting, batching = dict(batch) | waiting, batching.lowered(policy, len(batch), too_many)
            times["infer"] += time.perf_counter() - decided_from

    if pool.num_slots == 1:  # an inline environment works while we wait for it
        times["wait"] = max(0.0, times["wait"] - times["sim"] - times["render"] - times["preprocess"])
    kept = sorted((t for t in finished if schedule.admitted(t.episode)), key=lambda t: t.episode.index)
    return Collected(kept, times, time.perf_counter() - started, errors)


def _next_results(pool: Pool, waiting: int, running: int, batching: Batching) -> list[tuple[int, StepResult]]:
    """What the simulators have done: at least one result, unless environments wait for a decision already.

    With patience, also what they do within that time, up to a full batch.
    """
    results = list(pool.ready(timeout_s=0 if waiting else None))
    full = min(running, batching.max_size or running)
    give_up = time.perf_counter() + batching.patience_s
    while waiting + len(results) < full and (left := give_up - time.perf_counter()) > 0:
        if not (more := pool.ready(timeout_s=left)):
            break
        results += more
    return results


def decide(
    policy: Policy, observations: Sequence[Observation], generators: Sequence[torch.Generator], acting: Acting
) -> tuple[list[Decision], np.ndarray]:
    """One decision per observation, and the env-ready actions (B, chunk, 7).

    Each decision first draws who makes it (when epsilon leaves that open), then the student's tokens, all from its
    own generator.
    """
    by_teacher = [_teacher_decides(acting.epsilon, generator) for generator in generators]
    teacher_rows = [i for i, teacher in enumerate(by_teacher) if teacher or acting.record_teacher_match]
    student_rows = [i for i, teacher in enumerate(by_teacher) if not teacher]

    tokens: dict[int, torch.Tensor] = {}  # all four by row of `observations`
    actions: dict[int, np.ndarray] = {}
    logprobs: dict[int, torch.Tensor] = {}
    teacher_tokens: dict[int, torch.Tensor] = {}

    if teacher_rows:
        with policy.teacher():
            acted = policy.act([observations[i] for i in teacher_rows], mode=acting.teacher_mode)
        for row, i in enumerate(teacher_rows):
            teacher_tokens[i] = acted.tokens[row].cpu()
            if by_teacher[i]:
                tokens[i], actions[i] = teacher_tokens[i], acted.actions[row]
    if student_rows:
        acted = policy.act(
            [observations[i] for i in student_rows],
            mode=acting.student_mode,
            temperature=acting.temperature,
            generators=[generators[i] for i in student_rows] if acting.student_mode == "sample" else None,
        )
        for row, i in enumerate(student_rows):
            tokens[i], actions[i], logprobs[i] = acted.tokens[row].cpu(), acted.actions[row], acted.logprobs[row].cpu()
    unscored = [i for i, teacher in enumerate(by_teacher) if teacher and acting.record_student_logprobs]
    if unscored:
        with torch.no_grad():
            logits = policy.chunk_logits([observations[i] for i in unscored])
            chunks = torch.stack([tokens[i] for i in unscored]).to(logits.device)
            scores = policy.token_logprobs(logits, chunks, acting.temperature).cpu()
        for row, i in enumerate(unscored):
            logprobs[i] = scores[row]

    decisions = [
        Decision(
            observation=observations[i],
            tokens=tokens[i],
            by_teacher=by_teacher[i],
            student_logprobs=logprobs.get(i),
            matches_teacher=tokens[i] == teacher_tokens[i] if acting.record_teacher_match else None,
        )
        for i in range(len(observations))
    ]
    return decisions, np.stack([actions[i] for i in range(len(observations))])


def _teacher_decides(epsilon: float, generator: torch.Generator) -> bool:
    if epsilon in (0.0, 1.0):
        return epsilon == 1.0
    return torch.rand((), generator=generator).item() < epsilon


def _serve(
    policy: Policy, pool: Pool, batch: Sequence[tuple[int, _Running]], acting: Acting, randomness: Randomness
) -> str | None:
    """Decide for waiting environments as one batch and send them on; or, out of memory, return what that said."""
    generators = [randomness.generator(now.trajectory.episode, len(now.trajectory.decisions)) for _, now in batch]
    try:
        decisions, actions = decide(policy, [now.observation for _, now in batch], generators, acting)
    except torch.OutOfMemoryError as error:
        return first_line(error)
    for (slot, now), decision, chunk in zip(batch, decisions, actions, strict=True):
        now.decision, now.observation = decision, None
        pool.step(slot, chunk)
    return None


def _absorb(now: _Running, result: StepResult, keep_observations: bool) -> None:
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


def _play_again(schedule: _Schedule, now: _Running, error: str) -> None:
    episode = now.trajectory.episode
    if now.attempt >= MAX_ATTEMPTS:
        raise RuntimeError(f"the simulator failed {now.attempt} times on {episode.describe()}; last error: {error}")
    schedule.again.append((episode, now.attempt + 1))
