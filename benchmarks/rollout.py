"""Print the env steps per second of whole episodes: of LIBERO's own loop, and of pools of simulators.

    python -m benchmarks.rollout --workers 1 2 4                   # the simulation alone
    python -m benchmarks.rollout --workers 1 2 4 --latency-ms 25   # as if a policy took 25 ms for a batch

All rows play episodes of random actions in task 0 of libero_spatial (low-poly looks, two cameras), resets included. The
first row is what published evaluations do: one env, both cameras drawn at every env step. The others play chunks of
eight actions, as training does.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from command_line import main_guard, parse_flags
from envs.assets import find_pack
from envs.env import EnvSpec, Start
from envs.gl_backend import render_device
from envs.libero_imports import prepare_imports
from envs.libero_simulator import SETTLING_ACTION, SETTLING_STEPS
from envs.pool import Pool, make_pool
from envs.tasks import load_init_states, suite_task

TASK_ID = 0
NUM_INIT_STATES = 50
CHUNK_LENGTH = 8
ACTION_DIM = 7


@dataclass(frozen=True)
class Args:
    # Sizes of the pools.
    workers: tuple[int, ...] = (1, 2, 4)
    # Time that a batch of decisions takes.
    latency_ms: float = 0.0
    # Length of an episode in env steps; random actions never succeed.
    max_env_steps: int = 80
    # Episodes per env.
    episodes: int = 3


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.rollout", description=__doc__)
    spec = EnvSpec("libero_spatial", (TASK_ID,), max_env_steps=args.max_env_steps)
    reference = libero_steps_per_s(spec, args)
    print(f"LIBERO's loop  {reference:8.1f} env steps/s", flush=True)
    for num_envs in args.workers:
        steps_per_s = pool_steps_per_s(spec, num_envs, args)
        ratio = steps_per_s / reference
        print(f"{num_envs:2} simulators  {steps_per_s:8.1f} env steps/s, {ratio:5.1f} x", flush=True)


def libero_steps_per_s(spec: EnvSpec, args: Args) -> float:
    """Play one env as published evaluations do. The first env step is not timed, because it compiles functions."""
    prepare_imports()
    files = suite_task(spec.task_suite, TASK_ID)
    assert files.init_states is not None
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


def pool_steps_per_s(spec: EnvSpec, num_envs: int, args: Args) -> float:
    """Play the episodes in a pool, after one episode per env that builds the simulators."""
    with make_pool(spec, num_envs) as pool:
        play(pool, num_envs, args.latency_ms)
        started = time.perf_counter()
        env_steps = play(pool, args.episodes * num_envs, args.latency_ms)
        return env_steps / (time.perf_counter() - started)


def play(pool: Pool, num_episodes: int, latency_ms: float) -> int:
    """Play episodes of random actions; returns how many env steps they took.

    Each time that results arrive, this process sleeps `latency_ms`, as if it waited for a GPU to decide.
    """
    generator = np.random.default_rng(0)
    init_states = iter(range(num_episodes))
    for slot in range(pool.num_slots):
        pool.reset(slot, TASK_ID, Start(next(init_states) % NUM_INIT_STATES))
    env_steps = 0
    while results := pool.ready():
        time.sleep(latency_ms / 1000)
        for slot, result in results:
            env_steps += result.executed
            if not result.done:
                pool.step(slot, generator.uniform(-1, 1, (CHUNK_LENGTH, ACTION_DIM)))
            elif (init_state := next(init_states, None)) is not None:
                pool.reset(slot, TASK_ID, Start(init_state % NUM_INIT_STATES))
    return env_steps


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.rollout", main))
