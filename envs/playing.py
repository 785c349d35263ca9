"""Whole episodes of the scripted expert, with bursts of noise, here or side by side in the workers of a pool.

The expert reads the simulator's true state, which only the process that runs the simulator has. So a worker gets an
env that plays the whole episode within its reset (`EpisodeEnv`), and answers with the outcome.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from contracts import Observation
from envs.expert import Expert
from envs.libero import ChunkResult, EnvSpec, LiberoEnv
from envs.pool import Pool

NOISE_RHO = 0.8  # of the noise of one env step, what is left in the next
NOISE_WEIGHTS = np.array([1.0, 1.0, 1.0, 0.15, 0.15, 0.3])  # the expert's turns are as much smaller than its moves
BURST_STEPS = (3, 9)  # env steps of noise: the least, and one more than the most
CLEAN_STEPS = (12, 33)  # between two bursts; at least the chunk of a frame, with some room for the frame


def noise_bursts(scale: float, num_steps: int, generator: np.random.Generator) -> np.ndarray:
    """What is added to the six motions of each env step, (num_steps, 6): bursts of noise, and zeros between them.

    A burst is an Ornstein-Uhlenbeck process with a standard deviation of `scale` x NOISE_WEIGHTS. The quiet between
    the bursts is for the labels' sake: there a chunk of labels is what was executed, so it leads where it is meant to.
    Under steady noise the later labels of a chunk would correct pushes that the policy could not foresee.
    """
    noise = np.zeros((num_steps, 6))
    step = int(generator.integers(*CLEAN_STEPS))
    while step < num_steps:
        push = generator.standard_normal(6)
        for _ in range(generator.integers(*BURST_STEPS)):
            noise[step : step + 1] = scale * NOISE_WEIGHTS * push
            push = NOISE_RHO * push + np.sqrt(1 - NOISE_RHO**2) * generator.standard_normal(6)
            step += 1
        step += int(generator.integers(*CLEAN_STEPS))
    return noise


class Frame(NamedTuple):
    env_step: int
    observation: Observation
    objects: np.ndarray  # (6,) positions of bowl and plate


@dataclass(frozen=True)
class Playback:
    """One episode of the expert."""

    result: ChunkResult  # the last one
    labels: np.ndarray  # (env_steps + 1, 7) what the expert wanted in each state, the final one included
    executed: np.ndarray  # (env_steps, 7) labels and noise
    frames: list[Frame]


def play(
    env: LiberoEnv,
    init_state_id: int,
    noise: np.ndarray | None = None,
    wants_frame: Callable[[int], bool] = lambda env_step: False,
) -> Playback:
    """Play an episode with `noise` (max_env_steps, 6) on its motions; renders only in the env steps that are wanted.

    The fixtures stand where they stand in training and evaluation: the reset's seed is 0.
    """
    result = env.reset(init_state_id, observe=wants_frame(0))
    if result.error is not None:
        return Playback(result, np.zeros((0, 7)), np.zeros((0, 7)), [])
    expert = Expert(env.domain)
    labels, executed, frames = [], [], []
    while not result.done:
        if result.observation is not None:
            state = expert.look()
            frames.append(Frame(result.env_steps, result.observation, np.concatenate([state.bowl, state.plate])))
        labels.append(expert.act())
        executed.append(labels[-1] if noise is None else _disturbed(labels[-1], noise[result.env_steps]))
        result = env.step_chunk(executed[-1][None], observe=wants_frame(result.env_steps + 1))
    if result.error is None:  # after a fault there is no simulator left to look at
        labels.append(expert.act())
    return Playback(result, np.array(labels), np.array(executed), frames)


def _disturbed(action: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The action (7,) that is executed; the gripper obeys."""
    return np.concatenate([np.clip(action[:6] + noise, -1.0, 1.0), action[6:]])


class EpisodeEnv:
    """Stands in for LiberoEnv in a pool: its reset plays the whole episode and returns the outcome."""

    def __init__(self, spec: EnvSpec, task_id: int) -> None:
        self._env = LiberoEnv(spec, task_id)

    def reset(self, init_state_id: int, seed: int = 0, record: bool = False) -> ChunkResult:
        return play(self._env, init_state_id).result

    def close(self) -> None:
        self._env.close()


class Job(NamedTuple):
    """Arguments of a pool's reset."""

    task_id: int
    init_state_id: int
    seed: int = 0


def play_all(pool: Pool, jobs: Iterable[Job]) -> Iterator[tuple[Job, ChunkResult]]:
    """Play the jobs in the slots of a pool of episode envs; yields the outcomes as they come."""
    waiting, playing = iter(jobs), {}

    def start(slot: int) -> None:
        if (job := next(waiting, None)) is not None:
            playing[slot] = job
            pool.reset(slot, job.task_id, job.init_state_id, job.seed)

    for slot in range(pool.num_slots):
        start(slot)
    while playing:
        for slot, result in pool.ready():
            job = playing.pop(slot)
            start(slot)
            yield job, result
