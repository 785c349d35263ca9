"""Measure env steps per second of whole rollouts: of LIBERO's own loop, our env in this process, and pools of workers.

    python -m benchmarks.rollout --workers 1 2 4 --latency-ms 25

All play the same episodes, resets included. A stand-in for a policy sleeps `latency-ms` per batch, like a process that
waits for a GPU. For every number of workers there are two rows: the simulation alone (with a policy that answers at
once), and with the policy.

Columns: `of limit` is env steps/s as a share of the smaller of two limits, which are the fastest simulation alone, and
the policy alone on batches of one observation per env. sim, render, preprocess and idle are shares of an env's time;
infer and wait are shares of this process's time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from benchmarks.env_step import ACTION_DIM, make_reference, reset_reference, step_reference
from command_line import main_guard, parse_flags
from configs.bounds import NOT_NEGATIVE, POSITIVE, check_numbers
from contracts import Observation
from envs.env import EnvSpec
from envs.libero import task_files
from envs.pool import make_pool
from envs.tasks import load_init_states
from workshop.demo_files import CHUNK_LENGTH

if TYPE_CHECKING:  # imported where it is used: --help needs no torch
    import torch

    from rl.rollout import Rollout
    from vla.policy import Acted

ENV_PARTS = ("sim", "render", "preprocess")
PROCESS_PARTS = ("infer", "wait")
TASK_ID = 0
NUM_INIT_STATES = 50


@dataclass(frozen=True)
class Args:
    workers: Annotated[tuple[int, ...], POSITIVE] = (1, 2, 4)
    """Sizes of the pools; with 1 the env runs in this process."""
    simulators: Literal["processes", "ray"] = "processes"
    """Where the workers run: on this machine, or on Ray's nodes."""
    latency_ms: Annotated[float, NOT_NEGATIVE] = 25.0
    """Time that the stand-in policy takes for a batch."""
    max_env_steps: Annotated[int, POSITIVE] = 80
    """Length of an episode in env steps; random actions never succeed."""
    episodes: Annotated[int, POSITIVE] = 3
    """Episodes per env."""
    reference: bool = True
    """Also measure LIBERO's own loop."""

    def __post_init__(self) -> None:
        check_numbers(self)


class StandInPolicy:
    """A policy that sleeps `latency_s` in every call, when the CPU cores are free, and returns random tokens."""

    network = None  # there is none that could run out of memory

    def __init__(self, latency_s: float) -> None:
        import torch

        self.latency_s = latency_s
        self.device = torch.device("cpu")

    def act(
        self,
        observations: Sequence[Observation],
        mode: str = "sample",
        temperature: float = 1.0,
        generators: Sequence[torch.Generator] = (),
    ) -> Acted:
        import torch

        from vla.policy import Acted
        from vla.tokens import FIRST_ACTION_TOKEN, NUM_BINS

        time.sleep(self.latency_s)
        num_tokens = CHUNK_LENGTH * ACTION_DIM
        bins = torch.stack(
            [torch.randint(NUM_BINS, (num_tokens,), generator=generator) for generator in generators]
        )
        logprobs = torch.full(bins.shape, -float(np.log(NUM_BINS)))
        actions = bins.double().numpy().reshape(-1, CHUNK_LENGTH, ACTION_DIM) / (NUM_BINS / 2) - 1
        return Acted(bins + FIRST_ACTION_TOKEN, logprobs, actions)


@dataclass(frozen=True)
class Row:
    """One row of the printed table."""

    name: str
    num_envs: int
    env_steps_per_s: float
    times: dict[str, float]  # seconds, as Rollout.times
    wall_s: float


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.rollout", description=__doc__)
    spec = EnvSpec("libero_spatial", (TASK_ID,), max_env_steps=args.max_env_steps)
    policy = StandInPolicy(args.latency_ms / 1000)
    reference = libero_row(spec, args) if args.reference else None
    pairs = [pool_rows(spec, num_envs, policy, args) for num_envs in args.workers]
    fastest_simulation = max(simulation.env_steps_per_s for simulation, _ in pairs)
    print_header()
    if reference:
        print_row(reference, reference, None)
    for simulation, with_policy in pairs:
        limit = fastest_simulation
        if policy.latency_s:
            limit = min(limit, with_policy.num_envs * CHUNK_LENGTH / policy.latency_s)
        print_row(simulation, reference, None)
        print_row(with_policy, reference, limit)


def libero_row(spec: EnvSpec, args: Args) -> Row:
    """Measure one env as published evaluations run it: it renders every frame and waits for a policy once a chunk."""
    init_states = load_init_states(task_files(spec, TASK_ID).init_states)
    env = make_reference(spec, TASK_ID)
    generator = np.random.default_rng(0)
    reset_reference(env, init_states[0])
    step_reference(env, generator.uniform(-1, 1, (1, ACTION_DIM)))  # just-in-time compilation
    chunks = args.max_env_steps // CHUNK_LENGTH
    latency_s = args.latency_ms / 1000
    infer_s = 0.0
    started = time.perf_counter()
    for episode in range(args.episodes):
        reset_reference(env, init_states[episode % len(init_states)])
        for _ in range(chunks):
            time.sleep(latency_s)
            infer_s += latency_s
            step_reference(env, generator.uniform(-1, 1, (CHUNK_LENGTH, ACTION_DIM)))
    wall_s = time.perf_counter() - started
    env.close()
    env_steps = args.episodes * chunks * CHUNK_LENGTH
    times = {"sim": wall_s - infer_s, "infer": infer_s}
    return Row("LIBERO's loop (sim with render)", 1, env_steps / wall_s, times, wall_s)


def pool_rows(spec: EnvSpec, num_envs: int, policy: StandInPolicy, args: Args) -> tuple[Row, Row]:
    """Measure the same rollout twice: with a policy that takes no time, and with `policy`."""
    from rl.behaviour import Behaviour
    from rl.randomness import Randomness
    from rl.rollout import play_episodes
    from rl.trajectory import Episode

    behaviour = Behaviour(epsilon=0.0, temperature=1.0, keep_observations=False)
    name = "inline" if num_envs == 1 else f"{num_envs} workers"
    instant_policy = StandInPolicy(0.0)
    with make_pool(spec, num_envs, None, args.simulators) as pool:

        def play(player: StandInPolicy, num_episodes: int, purpose: str) -> Rollout:
            episodes = [Episode(i, TASK_ID, i % NUM_INIT_STATES, group=i) for i in range(num_episodes)]
            return play_episodes(player, pool, episodes, behaviour, Randomness(0, purpose))

        play(policy, num_envs, "warm up")  # builds the simulators
        simulation = play(instant_policy, args.episodes * num_envs, "rollout")
        with_policy = play(policy, args.episodes * num_envs, "rollout")
    return (
        pool_row(f"{name}, simulation alone", num_envs, simulation),
        pool_row(f"{name}, with policy", num_envs, with_policy),
    )


def pool_row(name: str, num_envs: int, played: Rollout) -> Row:
    return Row(name, num_envs, played.env_steps / played.wall_s, played.times, played.wall_s)


def print_header() -> None:
    env_parts = "".join(f"{part:>11}" for part in (*ENV_PARTS, "idle"))
    process_parts = "".join(f"{part:>8}" for part in PROCESS_PARTS)
    print(f"{'':34}{'env steps/s':>12}{'x LIBERO':>10}{'of limit':>10}{env_parts}{process_parts}")


def print_row(row: Row, reference: Row | None, limit: float | None) -> None:
    ratio = f"{row.env_steps_per_s / reference.env_steps_per_s:.1f}" if reference else "-"
    share_of_limit = f"{row.env_steps_per_s / limit:.0%}" if limit else "-"
    env_shares = [row.times.get(part, 0.0) / (row.num_envs * row.wall_s) for part in ENV_PARTS]
    env_shares.append(1 - sum(env_shares))  # idle
    process_shares = [row.times.get(part, 0.0) / row.wall_s for part in PROCESS_PARTS]
    columns = [f"{share:11.0%}" for share in env_shares] + [f"{share:8.0%}" for share in process_shares]
    print(
        f"{row.name:34}{row.env_steps_per_s:12.1f}{ratio:>10}{share_of_limit:>10}{''.join(columns)}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.rollout", main))
