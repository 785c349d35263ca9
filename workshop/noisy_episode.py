"""Let a scripted expert play one episode as unevenly as a person would, and record frames with the executed actions.

The expert alone is too exact to learn from: whole stages of an episode move along one axis only, so that a large share
of its labels is exactly 0, or exactly the largest move. A policy that is unsure spreads its probability over many
actions, and such a spike becomes its most likely one: the robot stands still. A person's hand is never so even, so the
expert gets a `tremor` at every env step. It is part of the action and of the label.
"""

from dataclasses import dataclass

import numpy as np

from contracts import Observation
from envs.env import ChunkResult, Start
from envs.libero import LiberoEnv
from vla.images import encode_jpeg
from workshop.demo_files import CHUNK_LENGTH, DemoEpisode
from workshop.expert import Expert
from workshop.moved_objects import reset_with_moved_objects

# The noise on the motions, of `tremor` and of `noise_bursts`: Ornstein-Uhlenbeck processes.
NOISE_RHO = 0.8  # share of the noise of one env step that remains in the next
TREMOR = 0.05  # standard deviation of the tremor, as a share of full action
# Turns get less noise than moves, because the expert's turns are smaller than its moves in about the same proportion.
NOISE_WEIGHTS = np.array([1.0, 1.0, 1.0, 0.15, 0.15, 0.3])
NUM_MOTIONS = len(NOISE_WEIGHTS)  # x, y, z and three turns; the gripper has no noise
# Standard deviations of the bursts, as shares of full action; the episodes take them in turn.
NOISE_SCALES = (0.3, 0.6, 0.9, 1.2)
BURST_STEPS = (3, 9)  # env steps of a burst: 3 to 8
# Env steps between two bursts: 12 to 32. A frame's chunk of 8 must fit in, and the frame may begin some steps later.
CLEAN_STEPS = (12, 33)
FRAME_EVERY = 4  # env steps between two frames, where the chunk of a frame is free of noise


@dataclass(frozen=True)
class Attempt:
    """An episode to play: everything that is decided before it starts."""

    task_id: int
    index: int  # among the episodes of the task
    seed: int  # of the placement
    noise_scale: float
    first_frame: int  # env step before which the first frame is due
    noise_generator: np.random.Generator
    moved_cm: float  # how far the objects are moved at the start
    move_generator: np.random.Generator


def record_episode(env: LiberoEnv, attempt: Attempt, looks: str) -> tuple[ChunkResult, DemoEpisode | None]:
    """Let the expert act under noise until the episode ends; render only the frames that are kept.

    Returns the last result and, if the expert succeeded, the episode. looks: as in `DemoEpisode`.
    """
    noise = noise_bursts(attempt.noise_scale, env.max_env_steps, attempt.noise_generator)
    uneven = tremor(env.max_env_steps + CHUNK_LENGTH, attempt.noise_generator)
    has_frame = frame_mask(noise, attempt.first_frame)
    start = Start(None, attempt.seed)
    result = reset_with_moved_objects(
        env, start, attempt.moved_cm / 100, attempt.move_generator, observe=has_frame[0]
    )
    if result.error is not None:
        return result, None
    expert = Expert(env.domain)
    frames: list[tuple[int, Observation]] = []  # the env steps before each frame, and the frame
    labels: list[np.ndarray] = []  # the expert's actions, one for each env step
    while not result.done:
        if result.observation is not None:
            frames.append((result.env_steps, result.observation))
        label = with_motion(expert.decide(), uneven[result.env_steps])
        labels.append(label)
        executed = with_motion(label, noise[result.env_steps])
        result = env.step_chunk(executed[None], observe=has_frame[result.env_steps + 1])
    if not result.success:
        return result, None
    # The last frame is up to FRAME_EVERY env steps before success, so its chunk of actions may reach beyond the end.
    # It is filled up with the expert's action in the final state (to let go of the bowl).
    last = expert.decide()
    beyond_the_end = uneven[result.env_steps : result.env_steps + CHUNK_LENGTH]
    labels += [with_motion(last, motion) for motion in beyond_the_end]
    episode = DemoEpisode(
        jpegs=[[encode_jpeg(image) for image in frame.images] for _, frame in frames],
        proprio=np.array([frame.proprio for _, frame in frames], np.float32),
        frame_steps=np.array([step for step, _ in frames], np.int64),
        actions=np.array(labels, np.float32),
        instruction=env.instruction,
        noise_scale=attempt.noise_scale,
        env_steps=result.env_steps,
        looks=looks,
        task_id=attempt.task_id,
    )
    return result, episode


def with_motion(action: np.ndarray, motion: np.ndarray) -> np.ndarray:
    """The action (7,) with `motion` (6,) added to its six motions, within [-1, 1]; the gripper stays as it is."""
    moved = action.copy()
    moved[:-1] = np.clip(moved[:-1] + motion, -1.0, 1.0)
    return moved


def frame_mask(noise: np.ndarray, first_frame: int) -> list[bool]:
    """Whether a frame is taken before each env step, and after the last one, [num_steps + 1].

    A frame is taken every FRAME_EVERY env steps, unless there is noise in the chunk of actions that follows.
    """
    is_due = [(step - first_frame) % FRAME_EVERY == 0 for step in range(len(noise) + 1)]
    is_noisy = [bool(noise[step : step + CHUNK_LENGTH].any()) for step in range(len(noise) + 1)]
    return [due and not noisy for due, noisy in zip(is_due, is_noisy, strict=True)]


def tremor(num_steps: int, generator: np.random.Generator) -> np.ndarray:
    """The unevenness of the expert's motions at each env step, (num_steps, 6): smooth noise."""
    noise = generator.standard_normal((num_steps, NUM_MOTIONS))
    for step in range(1, num_steps):
        noise[step] = NOISE_RHO * noise[step - 1] + np.sqrt(1 - NOISE_RHO**2) * noise[step]
    return TREMOR * NOISE_WEIGHTS * noise


def noise_bursts(scale: float, num_steps: int, generator: np.random.Generator) -> np.ndarray:
    """The noise on the motions of each env step, (num_steps, 6): bursts, and zeros between them.

    A burst is an Ornstein-Uhlenbeck process with a standard deviation of `scale` x NOISE_WEIGHTS. Frames come from the
    steps between bursts. There the labels of a chunk are the actions that were executed, so executing them leads where
    the expert wants to go. Under steady noise the later labels of a chunk would correct pushes that the policy cannot
    foresee.
    """
    noise = np.zeros((num_steps, NUM_MOTIONS))
    step = int(generator.integers(*CLEAN_STEPS))
    while step < num_steps:
        push = generator.standard_normal(NUM_MOTIONS)
        for _ in range(generator.integers(*BURST_STEPS)):
            # A slice, because it is empty beyond the end, where an index would raise an error.
            noise[step : step + 1] = scale * NOISE_WEIGHTS * push
            push = NOISE_RHO * push + np.sqrt(1 - NOISE_RHO**2) * generator.standard_normal(NUM_MOTIONS)
            step += 1
        step += int(generator.integers(*CLEAN_STEPS))
    return noise
