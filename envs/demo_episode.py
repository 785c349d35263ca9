"""One demonstration: which episode belongs to an index, how it is played, and what is kept of it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from demonstrations import CHUNK_LENGTH, DemoEpisode, encode_jpeg, episode_path, write_episode
from envs.demo_recipe import Recipe
from envs.libero import ChunkResult, EnvSpec, LiberoEnv
from envs.playing import CLEAN_STEPS, Playback, noise_bursts, play


@dataclass(frozen=True)
class Attempt:
    """What is drawn for an episode."""

    init_state_id: int
    noise_scale: float
    first_frame: int  # env step
    generator: np.random.Generator  # of the noise


def attempt_of(recipe: Recipe, task_id: int, index: int) -> Attempt:
    """The episode `index` of a task: a function of the arguments alone.

    The initial states take turns, and from round to round each meets another of the noise scales.
    """
    first, end = recipe.init_states
    round_, place = divmod(index, end - first)
    generator = np.random.default_rng([recipe.seed, task_id, index])
    return Attempt(
        init_state_id=first + place,
        noise_scale=recipe.noise_scales[(round_ + place) % len(recipe.noise_scales)],
        first_frame=int(generator.integers(min(recipe.frame_every, CLEAN_STEPS[0] - CHUNK_LENGTH + 1))),
        generator=generator,
    )


class DemoEnv:
    """Stands in for LiberoEnv in a pool: its reset plays an attempt and writes the file if that succeeds."""

    def __init__(self, recipe: Recipe, folder: Path, spec: EnvSpec, task_id: int) -> None:
        self._recipe, self._folder, self._task_id = recipe, folder, task_id
        self._env = LiberoEnv(spec, task_id)

    def reset(self, init_state_id: int, seed: int = 0, record: bool = False) -> ChunkResult:
        """`seed` is the episode's index, from which its initial state follows; a pool has no word for an index."""
        attempt = attempt_of(self._recipe, self._task_id, index=seed)
        noise = noise_bursts(attempt.noise_scale, self._env.max_env_steps, attempt.generator)

        def wants_frame(env_step: int) -> bool:
            is_due = (env_step - attempt.first_frame) % self._recipe.frame_every == 0
            return is_due and not noise[env_step : env_step + CHUNK_LENGTH].any()

        playback = play(self._env, attempt.init_state_id, noise, wants_frame)
        if playback.result.success:
            episode = demonstration(playback, self._task_id, attempt, self._env.instruction)
            write_episode(episode_path(self._folder, self._task_id, seed), episode)
        return playback.result

    def close(self) -> None:
        self._env.close()


def demonstration(playback: Playback, task_id: int, attempt: Attempt, instruction: str) -> DemoEpisode:
    """What is kept of a successful episode.

    The last frame lies up to `frame_every` env steps before success, so its chunk of actions reaches beyond it: the
    expert's answer to the final state (to let go of the bowl) fills it up.
    """
    labels, frames = playback.labels, playback.frames
    beyond = np.repeat(labels[-1:], CHUNK_LENGTH - 1, axis=0)
    return DemoEpisode(
        task_id=task_id,
        init_state_id=attempt.init_state_id,
        instruction=instruction,
        noise_scale=attempt.noise_scale,
        jpegs=[[encode_jpeg(image) for image in frame.observation.images] for frame in frames],
        proprio=np.array([frame.observation.proprio for frame in frames], np.float32),
        frame_steps=np.array([frame.env_step for frame in frames], np.int64),
        actions=np.concatenate([labels, beyond]).astype(np.float32),
        objects=np.array([frame.objects for frame in frames], np.float32),
        env_steps=playback.result.env_steps,
    )
