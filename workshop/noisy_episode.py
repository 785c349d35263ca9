"""Play one episode by a scripted expert under noise, and record frames with the expert's actions as their labels."""

from dataclasses import dataclass, field

import numpy as np

from envs.env import ChunkResult
from envs.libero import LiberoEnv
from envs.metaworld import MetaWorldEnv
from envs.perturb import Perturbation
from workshop.demo_files import CHUNK_LENGTH, encode_jpeg
from workshop.expert import Expert
from workshop.metaworld_expert import MetaWorldExpert

# The noise on the executed motions: see `noise_bursts`.
NOISE_RHO = 0.8  # share of the noise of one env step that remains in the next
# Turns get less noise than moves, because the expert's turns are smaller than its moves by about as much.
NOISE_WEIGHTS = np.array([1.0, 1.0, 1.0, 0.15, 0.15, 0.3])
BURST_STEPS = (3, 9)  # env steps of a burst: the fewest, and one more than the most
# Env steps between two bursts, likewise. At least the chunk of a frame, with some room for where the frame falls.
CLEAN_STEPS = (12, 33)


@dataclass(frozen=True)
class Attempt:
    """An episode to play: what is decided before it starts."""

    init_state_id: int | None  # of the benchmark; None: LIBERO's placement sampler draws one from `seed`
    seed: int
    noise_scale: float
    first_frame: int  # env step
    noise_generator: np.random.Generator
    perturbation: Perturbation | None


@dataclass
class Recording:
    """What is kept of an episode while it is played; see `DemoEpisode`."""

    jpegs: list[list[bytes]] = field(default_factory=list)
    proprio: list[np.ndarray] = field(default_factory=list)
    frame_steps: list[int] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)  # the expert's actions, one for each env step


def record_episode(
    env: LiberoEnv | MetaWorldEnv, attempt: Attempt, frame_every: int
) -> tuple[ChunkResult, Recording]:
    """Let the expert act under noise until the episode ends; render pictures only for the frames that are kept."""
    recording = Recording()
    noise = noise_bursts(attempt.noise_scale, env.max_env_steps, attempt.noise_generator, env.action_dim - 1)
    has_frame = frame_mask(noise, attempt.first_frame, frame_every)
    result = env.reset(
        attempt.init_state_id, attempt.seed, perturbation=attempt.perturbation, observe=has_frame[0]
    )
    if result.error is not None:
        return result, recording
    expert = MetaWorldExpert(env) if isinstance(env, MetaWorldEnv) else Expert(env.domain)
    while not result.done:
        if result.observation is not None:
            recording.jpegs.append([encode_jpeg(image) for image in result.observation.images])
            recording.proprio.append(result.observation.proprio)
            recording.frame_steps.append(result.env_steps)
        _, label = expert.decide()
        recording.labels.append(label)
        executed = label.copy()
        executed[:-1] = np.clip(executed[:-1] + noise[result.env_steps], -1.0, 1.0)  # no noise on the gripper
        result = env.step_chunk(executed[None], observe=has_frame[result.env_steps + 1])
    if result.success:
        # The last frame lies up to `frame_every` env steps before success, so its chunk of actions reaches beyond the
        # end. The expert's answer to the final state (to let go of the bowl) fills it up.
        _, label = expert.decide()
        recording.labels += [label] * CHUNK_LENGTH
    return result, recording


def frame_mask(noise: np.ndarray, first_frame: int, frame_every: int) -> list[bool]:
    """Whether a frame is taken before each env step, and after the last: at its turn, if its chunk is free of noise."""
    is_due = [(step - first_frame) % frame_every == 0 for step in range(len(noise) + 1)]
    is_noisy = [bool(noise[step : step + CHUNK_LENGTH].any()) for step in range(len(noise) + 1)]
    return [due and not noisy for due, noisy in zip(is_due, is_noisy, strict=True)]


def noise_bursts(
    scale: float, num_steps: int, generator: np.random.Generator, num_motions: int = 6
) -> np.ndarray:
    """What is added to the motions of each env step, (num_steps, num_motions): bursts of noise, and zeros between them.

    A burst is an Ornstein-Uhlenbeck process with a standard deviation of `scale` x NOISE_WEIGHTS. The quiet between
    the bursts is for the labels' sake: there the labels of a chunk are what was executed, so they lead where they are
    meant to. Under steady noise the later labels of a chunk would correct pushes that the policy could not foresee.
    """
    noise = np.zeros((num_steps, num_motions))
    step = int(generator.integers(*CLEAN_STEPS))
    while step < num_steps:
        push = generator.standard_normal(num_motions)
        for _ in range(generator.integers(*BURST_STEPS)):
            noise[step : step + 1] = (
                scale * NOISE_WEIGHTS[:num_motions] * push
            )  # a slice: empty beyond the end
            push = NOISE_RHO * push + np.sqrt(1 - NOISE_RHO**2) * generator.standard_normal(num_motions)
            step += 1
        step += int(generator.integers(*CLEAN_STEPS))
    return noise
