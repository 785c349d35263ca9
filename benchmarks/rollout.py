"""Print the env steps per second of whole rollouts: of LIBERO's own loop, and of pools of simulators.

    python -m benchmarks.rollout --workers 1 2 4                   # the simulation alone
    python -m benchmarks.rollout --workers 1 2 4 --latency-ms 25   # with a policy that takes 25 ms for a batch

All rows play episodes of random actions in task 0 of libero_spatial (low-poly looks, two cameras), resets included. The
first row is what published evaluations do: one env, both cameras drawn at every env step. The others play chunks of
eight actions, as training does; with one worker the env runs in this process.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from command_line import main_guard, parse_flags
from contracts import Observation
from envs.assets import find_pack
from envs.env import EnvSpec
from envs.gl_backend import render_device
from envs.libero import task_files
from envs.libero_imports import prepare_imports
from envs.libero_simulator import SETTLING_ACTION, SETTLING_STEPS
from envs.pool import make_pool
from envs.tasks import load_init_states
from rl.behaviour import Behaviour
from rl.episode_queue import PlayAll
from rl.randomness import Randomness
from rl.ranks import ALONE
from rl.rollout import EpisodePlayer, Rollout, play_rollout
from rl.trajectory import Episode
from vla.policy import Acted
from vla.tokens import FIRST_ACTION_TOKEN, NUM_BINS

TASK_ID = 0
NUM_INIT_STATES = 50
CHUNK_LENGTH = 8
ACTION_DIM = 7


@dataclass(frozen=True)
class Args:
    # Sizes of the pools.
    workers: tuple[int, ...] = (1, 2, 4)
    # Where the workers run: on this machine, or on Ray's nodes.
    simulators: Literal["processes", "ray"] = "processes"
    # Time that the stand-in policy takes for a batch.
    latency_ms: float = 0.0
    # Length of an episode in env steps; random actions never succeed.
    max_env_steps: int = 80
    # Episodes per env.
    episodes: int = 3


class StandInPolicy:
    """A policy that sleeps `latency_s` in every call, as if it waited for a GPU, and returns random tokens."""

    network = None  # there is none that could run out of memory
    device = torch.device("cpu")

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    def act(
        self,
        observations: Sequence[Observation],
        mode: str = "sample",
        temperature: float = 1.0,
        generators: Sequence[torch.Generator] = (),
    ) -> Acted:
        time.sleep(self.latency_s)
        num_tokens = CHUNK_LENGTH * ACTION_DIM
        drawn = [torch.randint(NUM_BINS, (num_tokens,), generator=generator) for generator in generators]
        bins = torch.stack(drawn)
        logprobs = torch.full(bins.shape, -float(np.log(NUM_BINS)))
        actions = bins.double().numpy().reshape(-1, CHUNK_LENGTH, ACTION_DIM) / (NUM_BINS / 2) - 1
        return Acted(bins + FIRST_ACTION_TOKEN, logprobs, actions, [None] * len(bins))


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.rollout", description=__doc__)
    spec = EnvSpec("libero_spatial", (TASK_ID,), max_env_steps=args.max_env_steps)
    reference = libero_steps_per_s(spec, args)
    print(f"LIBERO's loop  {reference:8.1f} env steps/s", flush=True)
    for num_envs in args.workers:
        played = play(spec, num_envs, args)
        steps_per_s = played.env_steps / played.wall_s
        ratio = steps_per_s / reference
        print(f"{num_envs:2} simulators  {steps_per_s:8.1f} env steps/s, {ratio:5.1f} x", flush=True)


def libero_steps_per_s(spec: EnvSpec, args: Args) -> float:
    """Play one env as published evaluations do. The first env step is not timed, because it compiles functions."""
    prepare_imports()
    files = task_files(spec, TASK_ID)
    init_states = load_init_states(files.init_states)
    with render_device():
        import libero.libero
        from libero.libero.envs.env_wrapper import OffScreenRenderEnv

        libero.libero._assets_path_cache = str(find_pack(spec.assets).folder)
        env = OffScreenRenderEnv(bddl_file_name=str(files.bddl), camera_heights=256, camera_widths=256)
    env.reset()
    env.step(SETTLING_ACTION)
    generator = np.random.default_rng(0)
    chunks = args.max_env_steps // CHUNK_LENGTH
    started = time.perf_counter()
    for episode in range(args.episodes):
        env.seed(0)
        env.reset()
        env.set_init_state(init_states[episode % len(init_states)])
        for _ in range(SETTLING_STEPS):
            env.step(SETTLING_ACTION)
        for _ in range(chunks):
            time.sleep(args.latency_ms / 1000)
            for action in generator.uniform(-1, 1, (CHUNK_LENGTH, ACTION_DIM)):
                env.step(action)
    seconds = time.perf_counter() - started
    env.close()
    return args.episodes * chunks * CHUNK_LENGTH / seconds


def play(spec: EnvSpec, num_envs: int, args: Args) -> Rollout:
    """Play the episodes in a pool, after one episode per env that builds the simulators."""
    policy = StandInPolicy(args.latency_ms / 1000)
    behaviour = Behaviour(epsilon=0.0, temperature=1.0, keep_observations=False)
    with make_pool(spec, num_envs, None, args.simulators) as pool:
        for num_episodes in (num_envs, args.episodes * num_envs):
            episodes = [Episode(i, TASK_ID, i % NUM_INIT_STATES, group=i) for i in range(num_episodes)]
            player = EpisodePlayer(policy, pool, behaviour, Randomness(0, "rollout"))
            played = play_rollout(player, PlayAll(episodes, ALONE))
    return played


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.rollout", main))
