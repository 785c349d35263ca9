"""Env steps a second of whole rollouts: LIBERO's own loop, our env in this process, pools of workers; all in one run.

    python -m benchmarks.rollout --workers 1 2 4 --latency-ms 25
    python -m benchmarks.rollout --workers 8 --checkpoint FOLDER --device cuda

The same episodes are played throughout, resets included. The stand-in policy sleeps `latency-ms` a batch, as a process
does that waits for a GPU; with --checkpoint a real policy decides. For every number of workers there are two rows: the
simulation alone (a policy that answers at once) and with the policy. `of limit`: env steps/s as a share of the smaller
of two limits, the fastest simulation alone and the policy alone on batches of one observation per env.
Shares: sim, render, preprocess and idle of an env's time; infer and wait of this process's time.
"""

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import tyro

from benchmarks.env_step import make_reference, reset_reference, step_reference
from benchmarks.gpu import observations, timed
from benchmarks.stand_in import CHUNK, StandInPolicy
from envs.env import EnvSpec
from envs.libero import task_files
from envs.pool import make_pool
from envs.rendering import prepare
from envs.tasks import load_init_states
from rl.behaviour import Behaviour
from rl.randomness import Randomness
from rl.rollout import Rollout, play_episodes
from rl.trajectory import Episode
from vla.loading import LoadOptions
from vla.policy import Policy

PARTS_OF_ENV = ("sim", "render", "preprocess")
BEHAVIOUR = Behaviour(epsilon=0.0, temperature=1.0, keep_observations=False)


@dataclass(frozen=True)
class Arguments:
    task_suite: str = "libero_spatial"
    task_id: int = 0
    workers: tuple[int, ...] = (1, 2, 4)
    """Sizes of the pools; 1 is the env in this process."""
    simulators: Literal["processes", "ray"] = "processes"
    """Where the workers run: here, or on Ray's nodes."""
    latency_ms: float = 25.0
    """Of the stand-in policy, per batch."""
    max_env_steps: int = 80
    """Length of an episode; random actions never succeed."""
    episodes: int = 3
    """Per env."""
    max_batch: int | None = None
    num_images: int = 2
    assets: str = "lowpoly"
    checkpoint: str | None = None
    """A real policy in place of the stand-in."""
    device: str = "cpu"
    reference: bool = True
    """Also measure LIBERO's own loop."""


@dataclass(frozen=True)
class Row:
    name: str
    num_envs: int
    env_steps_per_s: float
    times: dict[str, float]  # seconds, as Rollout.times
    wall_s: float


def main(arguments: Arguments) -> None:
    spec = EnvSpec(
        arguments.task_suite, (arguments.task_id,), arguments.num_images, arguments.assets,
        max_env_steps=arguments.max_env_steps,
    )  # fmt: skip
    policy = load_policy(arguments)
    reference = libero_row(spec, arguments) if arguments.reference else None
    pairs = [pool_rows(spec, num_envs, policy, arguments) for num_envs in arguments.workers]
    fastest_simulation = max(alone.env_steps_per_s for alone, _ in pairs)
    print_header()
    if reference:
        print_row(reference, reference, None)
    for alone, together in pairs:
        limit = limit_of(fastest_simulation, policy, arguments, together.num_envs)
        print_row(alone, reference, None)
        print_row(together, reference, limit)


def load_policy(arguments: Arguments):
    if arguments.checkpoint is None:
        return StandInPolicy(arguments.latency_ms / 1000)
    torch.set_num_threads(1)  # the other cores are the simulators'
    return Policy.load(
        arguments.checkpoint, LoadOptions(task_suite=arguments.task_suite, device=arguments.device)
    )


def libero_row(spec: EnvSpec, arguments: Arguments) -> Row:
    """One env as the published evaluations run it: every frame rendered, a pause for the policy after each chunk."""
    prepare()
    init_states = load_init_states(task_files(spec, arguments.task_id).init_states)
    env = make_reference(spec, arguments.task_id)
    random = np.random.default_rng(0)
    reset_reference(env, init_states[0])
    step_reference(env, random.uniform(-1, 1, (1, 7)))  # just-in-time compilation
    started, infer_s = time.perf_counter(), 0.0
    chunks = arguments.max_env_steps // CHUNK
    for episode in range(arguments.episodes):
        reset_reference(env, init_states[episode])
        for _ in range(chunks):
            if arguments.checkpoint is None:
                time.sleep(arguments.latency_ms / 1000)
                infer_s += arguments.latency_ms / 1000
            step_reference(env, random.uniform(-1, 1, (CHUNK, 7)))
    wall_s = time.perf_counter() - started
    env.close()
    times = {"sim": wall_s - infer_s, "infer": infer_s}
    return Row(
        "LIBERO's loop (sim with render)", 1, arguments.episodes * chunks * CHUNK / wall_s, times, wall_s
    )


def pool_rows(spec: EnvSpec, num_envs: int, policy, arguments: Arguments) -> tuple[Row, Row]:
    """The same rollout without and with the policy's time."""
    name = "inline" if num_envs == 1 else f"{num_envs} workers"
    max_batch = arguments.max_batch
    prepare = None if isinstance(policy, StandInPolicy) else policy.prepare
    with make_pool(spec, num_envs, prepare, arguments.simulators) as pool:
        play_episodes(
            policy, pool, episodes(arguments, num_envs), BEHAVIOUR, Randomness(0, "warm up")
        )  # builds simulators
        played = episodes(arguments, arguments.episodes * num_envs)
        alone = play_episodes(
            StandInPolicy(0.0), pool, played, BEHAVIOUR, Randomness(0, "rollout"), max_batch=max_batch
        )
        together = play_episodes(
            policy, pool, played, BEHAVIOUR, Randomness(0, "rollout"), max_batch=max_batch
        )
    return row(f"{name}, simulation alone", num_envs, alone), row(f"{name}, with policy", num_envs, together)


def episodes(arguments: Arguments, count: int) -> list[Episode]:
    return [Episode(number, arguments.task_id, number % 50, number) for number in range(count)]


def row(name: str, num_envs: int, played: Rollout) -> Row:
    return Row(name, num_envs, played.env_steps / played.wall_s, played.times, played.wall_s)


def limit_of(fastest_simulation: float, policy, arguments: Arguments, num_envs: int) -> float | None:
    """The smaller limit; None for a real policy on the CPU, which takes the simulators' cores: there are no two."""
    if arguments.checkpoint is not None and arguments.device == "cpu":
        return None
    return min(fastest_simulation, policy_limit(policy, arguments, num_envs))


def policy_limit(policy, arguments: Arguments, num_envs: int) -> float:
    """Env steps a second of a policy that always has a full batch of `num_envs` observations to decide on."""
    if isinstance(policy, StandInPolicy):
        return num_envs * CHUNK / policy.latency_s if policy.latency_s else float("inf")
    seen = observations(policy, num_envs)
    generators = [torch.Generator().manual_seed(i) for i in range(num_envs)]
    return num_envs * CHUNK / timed(lambda: policy.act(seen, mode="sample", generators=generators), 5)


def print_header() -> None:
    of_env = "".join(f"{part:>11}" for part in (*PARTS_OF_ENV, "idle"))
    of_us = "".join(f"{part:>8}" for part in ("infer", "wait"))
    print(f"{'':34}{'env steps/s':>12}{'x LIBERO':>10}{'of limit':>10}{of_env}{of_us}")


def print_row(measured: Row, reference: Row | None, limit: float | None) -> None:
    ratio = f"{measured.env_steps_per_s / reference.env_steps_per_s:.1f}" if reference else "-"
    share = f"{measured.env_steps_per_s / limit:.0%}" if limit else "-"
    busy = [measured.times.get(part, 0.0) / (measured.num_envs * measured.wall_s) for part in PARTS_OF_ENV]
    own = [measured.times.get(part, 0.0) / measured.wall_s for part in ("infer", "wait")]
    shares = "".join(f"{part:11.0%}" for part in (*busy, 1 - sum(busy))) + "".join(
        f"{part:8.0%}" for part in own
    )
    print(f"{measured.name:34}{measured.env_steps_per_s:12.1f}{ratio:>10}{share:>10}{shares}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
