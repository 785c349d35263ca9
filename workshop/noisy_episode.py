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
# Standard deviation of the tremor, as a share of full action. A policy that learned from demonstrations with 0.1
# succeeded 12 points more often by medians than greedily, and 0.03 was no better than 0.05.
TREMOR = 0.05
# Turns get less noise than moves, because the expert's turns are smaller than its moves in about the same proportion.
NOISE_WEIGHTS = np.array([1.0, 1.0, 1.0, 0.15, 0.15, 0.3])
NUM_MOTIONS = len(NOISE_WEIGHTS)  # x, y, z and three turns; the gripper has no noise
# Standard deviations of the bursts, as shares of full action; the episodes take them in turn.
NOISE_SCALES = (0.3, 0.6, 0.9, 1.2)
BURST_STEPS = (3, 9)  # env steps of a burst: 3 to 8
# Env steps between two bursts: 12 to 32. A frame's chunk of 8 must fit in, and the frame may begin some steps later.
CLEAN_STEPS = (12, 33)
FRAME_EVERY = 4  # env steps between two frames, where the chunk of a frame is free of noise

# Streams of random numbers, so that no choice depends on how many numbers another one draws.
PLACEMENT_STREAM = 1
MOVE_STREAM = 2


@dataclass(frozen=True)
class Attempt:
    """All that is decided before an episode starts."""

    start: Start
    moved_m: float  # how far the objects are moved before it starts
    move_generator: np.random.Generator
    noise_scale: float
    noise: np.ndarray  # on the executed motions of each env step, (max_env_steps, 6)
    tremor: np.ndarray  # of the expert's motions at each env step, (max_env_steps + 8, 6)
    has_frame: list[bool]  # whether a frame is taken before each env step, and after the last one


def attempt_of(env: LiberoEnv, seed: int, index: int, distances_cm: tuple[float, ...]) -> Attempt:
    """What is decided about episode `index` of the env's task, a function of the arguments alone.

    The episode draws one of `distances_cm`, or 0, by which its objects are moved.
    """
    generator = np.random.default_rng([seed, env.task_id, index])
    placement_generator = np.random.default_rng([seed, env.task_id, index, PLACEMENT_STREAM])
    move_generator = np.random.default_rng([seed, env.task_id, index, MOVE_STREAM])
    noise_scale = NOISE_SCALES[index % len(NOISE_SCALES)]
    first_frame = int(generator.integers(FRAME_EVERY))
    noise = noise_bursts(noise_scale, env.max_env_steps, generator)
    return Attempt(
        start=Start(None, int(placement_generator.integers(2**32))),
        moved_m=float(move_generator.choice((0.0, *distances_cm))) / 100,
        move_generator=move_generator,
        noise_scale=noise_scale,
        noise=noise,
        tremor=tremor(env.max_env_steps + CHUNK_LENGTH, generator),
        has_frame=frame_mask(noise, first_frame),
    )


def record_episode(env: LiberoEnv, attempt: Attempt, looks: str) -> tuple[ChunkResult, DemoEpisode | None]:
    """Let the expert act under noise until the episode ends; render only the frames that are kept.

    Returns the last result and, if the expert succeeded, the episode. looks: as in `DemoEpisode`.
    """
    result = reset_with_moved_objects(
        env, attempt.start, attempt.moved_m, attempt.move_generator, observe=attempt.has_frame[0]
    )
    if result.error is not None:
        return result, None
    expert = Expert(env.domain)
    frames: list[tuple[int, Observation]] = []  # the env steps before each frame, and the frame
    labels: list[np.ndarray] = []  # the expert's actions, one for each env step
    while not result.done:
        if result.observation is not None:
            frames.append((result.env_steps, result.observation))
        label = with_motion(expert.decide(), attempt.tremor[result.env_steps])
        labels.append(label)
        executed = with_motion(label, attempt.noise[result.env_steps])
        result = env.step_chunk(executed[None], observe=attempt.has_frame[result.env_steps + 1])
    if not result.success:
        return result, None
    # The last frame is up to FRAME_EVERY env steps before success, so its chunk of actions may reach beyond the end.
    # It is filled up with the expert's action in the final state (to let go of the bowl).
    last = expert.decide()
    beyond_the_end = attempt.tremor[result.env_steps : result.env_steps + CHUNK_LENGTH]
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
        task_id=env.task_id,
    )
    return result, episode


def with_motion(action: np.ndarray, motion: np.ndarray) -> np.ndarray:
    """The action (7,) with `motion` (6,) added to its six motions, within [-1, 1]; the gripper stays as it is."""
    moved = action.copy()
    moved[:-1] = np.clip(moved[:-1] + motion, -1.0, 1.0)
    return moved


def frame_mask(noise: np.ndarray, first_frame: int) -> list[bool]:
    """`Attempt.has_frame`: every FRAME_EVERY env steps, unless there is noise in the chunk of actions that follows."""
    return [
        (step - first_frame) % FRAME_EVERY == 0 and not noise[step : step + CHUNK_LENGTH].any()
        for step in range(len(noise) + 1)
    ]


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
