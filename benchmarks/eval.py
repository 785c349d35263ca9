"""Wall time of an evaluation (50 episodes, the published protocol) by the pool and by LIBERO's own loop.

    python -m benchmarks.eval --episodes 50 --num-envs 4

The stand-in policy acts at random, so every episode lasts as long as the step limit: the worst case. LIBERO's
loop plays `serial-episodes` of them, one after the other, and its time is scaled up to all.
"""

import time
from dataclasses import dataclass

import tyro

from benchmarks.rollout import Arguments as RolloutArguments
from benchmarks.rollout import libero_row
from benchmarks.stand_in import StandInPolicy
from envs.libero import EnvSpec
from envs.pool import make_pool
from envs.tasks import MAX_ENV_STEPS
from rl.evaluation import evaluate
from rl.rollout import Acting
from rl.trajectory import Episode


@dataclass(frozen=True)
class Arguments:
    task_suite: str = "libero_spatial"
    task_id: int = 0
    episodes: int = 50
    num_envs: int = 4
    serial_episodes: int = 2
    latency_ms: float = 25.0
    max_env_steps: int | None = None
    """None: the suite's."""


def main(arguments: Arguments) -> None:
    limit = arguments.max_env_steps or MAX_ENV_STEPS[arguments.task_suite]
    spec = EnvSpec(arguments.task_suite, (arguments.task_id,), max_env_steps=limit)
    started = time.perf_counter()
    with make_pool(spec, arguments.num_envs) as pool:
        collected = evaluate(
            StandInPolicy(arguments.latency_ms / 1000),
            pool,
            [Episode(i, arguments.task_id, i % 50, i) for i in range(arguments.episodes)],
            Acting(epsilon=0.0, temperature=1.0, keep_observations=False),
            seed=0,
        )
    pool_s = time.perf_counter() - started  # with the start of the workers

    serial = RolloutArguments(
        arguments.task_suite, arguments.task_id, latency_ms=arguments.latency_ms, max_env_steps=limit,
        episodes=arguments.serial_episodes,
    )  # fmt: skip
    serial_s = arguments.episodes * limit / libero_row(spec, serial).env_steps_per_s
    print(f"{arguments.episodes} episodes of {limit} env steps, {collected.env_steps} in all, seconds:")
    print(f"  {arguments.num_envs} env(s), start included  {pool_s:8.1f}")
    print(f"  LIBERO's loop, from {arguments.serial_episodes} episodes {serial_s:8.1f}   ratio {serial_s / pool_s:.1f}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
