"""Collect demonstrations of a scripted expert: noisy episodes, labelled with what the expert wanted.

python -m workshop.demos --out demonstrations/spatial --task-ids 0 1 --episodes 200 --num-envs 16

The same command goes on where it was stopped. Episode i of a task is the same whatever else is collected, by however
many processes. Failed ones are dropped, and remembered in attempts.jsonl. How often it succeeds in the states of
evaluations: --episodes 50 --init-states 0 50 --noise-scales 0. File format: workshop/demo_files.py.
LIBERO's expert is ours and knows libero_spatial; --task-suite metaworld_mt50 has Meta-World's, for all of its tasks.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from configs.cli import main_guard, parse_flags
from configs.config import SimulatorConfig, check_numbers
from contracts import BadInput, read_json, write_json
from envs.assets import METAWORLD_LOOKS, find_pack
from envs.env import EnvSpec
from envs.libero import LiberoEnv
from envs.metaworld import MetaWorldEnv
from envs.perturb import NONE, Kind, Perturbation, from_label
from envs.pool import make_env, task_info
from envs.tasks import METAWORLD
from workshop.demo_files import CHUNK_LENGTH, DemoEpisode, encode_jpeg, episode_path, write_episode
from workshop.expert import Expert
from workshop.metaworld_expert import MetaWorldExpert

REPORT_EVERY_S = 10.0
NOISE_RHO = 0.8  # of the noise of one env step, what is left in the next
NOISE_WEIGHTS = np.array(
    [1.0, 1.0, 1.0, 0.15, 0.15, 0.3]
)  # the expert's turns are as much smaller than its moves
BURST_STEPS = (3, 9)  # env steps of noise: the least, and one more than the most
CLEAN_STEPS = (12, 33)  # between two bursts; at least the chunk of a frame, with some room for the frame


class Start(NamedTuple):
    """What `LiberoEnv.reset` starts from."""

    init_state_id: int | None
    seed: int


@dataclass(frozen=True)
class DemosArgs:
    """Collect demonstrations of the scripted expert: noisy episodes, labelled with what the expert wanted."""

    out: Path
    """Folder to write, or to go on with."""
    task_ids: tuple[int, ...] = (0,)
    """Task ids within the suite."""
    episodes: int = 200
    """Episodes to play per task; most of them succeed."""
    num_envs: int = 1
    """Simulators: 1 steps inline, N > 1 run in worker processes, an episode in each."""
    task_suite: str = "libero_spatial"
    """Suite that the tasks belong to."""
    init_states: tuple[int, int] | Literal["fresh"] = "fresh"
    """`fresh`: LIBERO's placement sampler draws one for every episode, and the benchmark's are all held out; or first
    and one-past-last of the benchmark's initial states."""
    noise_scales: tuple[float, ...] = (0.3, 0.6, 0.9, 1.2)
    """Standard deviations, as shares of full action, of the bursts of noise on the executed moves; the episodes take
    them in turn."""
    frame_every: int = 4
    """Env steps between two frames, where the chunk of a frame is free of noise."""
    seed: int = 0
    """Seed of everything random."""
    perturb: tuple[Kind, ...] = ()
    """Kinds of change to LIBERO's world (docs/OWN_TASKS.md); every episode draws one of them, or none."""
    magnitudes: tuple[int, ...] = (1, 3, 5)
    """How far they go, in steps of 1 to 5."""
    assets: str = "lowpoly"
    """What LIBERO's objects look like: `lowpoly`, `official` or a folder."""

    def recipe(self) -> dict[str, Any]:
        """Everything that the content of the folder depends on, besides tasks and number, as JSON has it."""
        others = (
            "out",
            "task_ids",
            "episodes",
            "num_envs",
            *(("perturb", "magnitudes") if not self.perturb else ()),
        )
        return json.loads(json.dumps({key: value for key, value in vars(self).items() if key not in others}))

    def env_spec(self, task_ids: tuple[int, ...]) -> EnvSpec:
        """All cameras of the suite's simulator."""
        if self.task_suite == METAWORLD:
            return EnvSpec(self.task_suite, task_ids, num_images=1, assets=METAWORLD_LOOKS)
        return EnvSpec(self.task_suite, task_ids, assets=self.assets)


def collect(args: DemosArgs) -> Counter:
    """Play what the folder still lacks; returns how many episodes ended as success, failure and fault.

    A fault of the simulator is no failure of the expert: its episode is played again by the next collection.
    """
    spec = args.env_spec(args.task_ids)
    stored = min(task.num_init_states for task in task_info(spec))
    first, end = (0, 1) if args.init_states == "fresh" else args.init_states
    if not 0 <= first < end <= stored:
        raise BadInput(f"--init-states {first} {end}: the tasks have 0 .. {stored}; END is left out")
    check_numbers(args)
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "recipe.json").exists():
        write_json(args.out / "recipe.json", args.recipe())
    if (found := read_json(args.out / "recipe.json")) != args.recipe():
        raise BadInput(
            f"{args.out} holds demonstrations of other settings: {found}; use them or another --out"
        )
    find_pack(spec.assets)  # made once, here, rather than by all workers at the same time
    failed = failed_attempts(args.out / "attempts.jsonl")
    places = [(task_id, index) for task_id in args.task_ids for index in range(args.episodes)]
    places = [
        place for place in places if place not in failed and not episode_path(args.out, *place).exists()
    ]
    print(f"{args.out}: {len(places)} of {len(args.task_ids) * args.episodes} episodes to play", flush=True)
    counts: Counter = Counter()
    started = reported = time.monotonic()
    with ExitStack() as stack:
        journal = stack.enter_context((args.out / "attempts.jsonl").open("a"))
        if args.num_envs > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            executor = stack.enter_context(ProcessPoolExecutor(args.num_envs, get_context("spawn")))
        for attempt in (map if args.num_envs == 1 else executor.map)(partial(play_attempt, args), places):
            counts[attempt["outcome"]] += 1
            journal.write(json.dumps(attempt) + "\n")
            journal.flush()
            if counts.total() == len(places) or time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                done = ", ".join(f"{counts[name]} {name}" for name in ("success", "failure", "fault"))
                speed = counts.total() / (reported - started)
                print(f"{counts.total()}/{len(places)} episodes: {done}; {speed:.2f} episodes/s", flush=True)
    return counts


def failed_attempts(journal: Path) -> set[tuple[int, int]]:
    """(task id, index) of the episodes that are known to fail. A line cut short by a crash is none."""
    failed = set()
    for line in journal.read_text().splitlines() if journal.exists() else []:
        with suppress(ValueError):
            attempt = json.loads(line)
            if attempt["outcome"] == "failure":
                failed.add((attempt["task_id"], attempt["index"]))
    return failed


def attempt_of(args: DemosArgs, task_id: int, index: int) -> tuple[Start, float, int, np.random.Generator]:
    """The episode `index` of a task: its start, noise scale, env step of the first frame, generator of the noise.

    A function of the arguments alone. The benchmark's initial states take turns, and from round to round each meets
    another of the noise scales.
    """
    generator = np.random.default_rng([args.seed, task_id, index])
    if args.init_states == "fresh":
        placement = int(np.random.default_rng([args.seed, task_id, index, 1]).integers(2**32))
        round_, place, start = 0, index, Start(None, placement)
    else:
        first, end = args.init_states
        round_, place = divmod(index, end - first)
        start = Start(first + place, 0)
    noise_scale = args.noise_scales[(round_ + place) % len(args.noise_scales)]
    first_frame = int(generator.integers(min(args.frame_every, CLEAN_STEPS[0] - CHUNK_LENGTH + 1)))
    return start, noise_scale, first_frame, generator


def change_of(args: DemosArgs, task_id: int, index: int) -> Perturbation | None:
    """How the world of an episode is perturbed, a function of the arguments alone."""
    labels = (NONE, *SimulatorConfig(perturb=args.perturb, magnitudes=args.magnitudes).perturbations)
    generator = np.random.default_rng([args.seed, task_id, index, 2])
    return from_label(str(generator.choice(labels)), int(generator.integers(2**32)))


@lru_cache(1)
def _env_and_looks(spec: EnvSpec) -> tuple[LiberoEnv | MetaWorldEnv, str]:
    pack = find_pack(spec.assets)
    return make_env(replace(spec, assets=str(pack.folder)), spec.task_ids[0]), pack.looks


def play_attempt(args: DemosArgs, place: tuple[int, int]) -> dict[str, Any]:
    """Play an episode (task id, index) and write it if it succeeds; returns its line of the journal.

    Rendered only where a frame is wanted. In the benchmark's states fixtures stand where evaluation puts them.
    """
    task_id, index = place
    (init_state_id, seed), noise_scale, first_frame, generator = attempt_of(args, task_id, index)
    env, looks = _env_and_looks(args.env_spec((task_id,)))
    noise = noise_bursts(noise_scale, env.max_env_steps, generator, env.action_dim - 1)

    def wants_frame(env_step: int) -> bool:
        is_due = (env_step - first_frame) % args.frame_every == 0
        return is_due and not noise[env_step : env_step + CHUNK_LENGTH].any()

    frames, proprio, steps, labels = [], [], [], []
    change = change_of(args, task_id, index)
    result = env.reset(init_state_id, seed, perturbation=change, observe=wants_frame(0))
    if result.error is None:
        expert = MetaWorldExpert(env) if isinstance(env, MetaWorldEnv) else Expert(env.domain)
    while not result.done:
        if result.observation is not None:
            frames.append([encode_jpeg(image) for image in result.observation.images])
            proprio.append(result.observation.proprio)
            steps.append(result.env_steps)
        labels.append(expert.decide()[1])
        executed = labels[-1].copy()
        executed[:-1] = np.clip(executed[:-1] + noise[result.env_steps], -1.0, 1.0)  # the gripper obeys
        result = env.step_chunk(executed[None], observe=wants_frame(result.env_steps + 1))
    stored = -1 if init_state_id is None else init_state_id
    drawn: Any = {"task_id": task_id, "init_state_id": stored, "noise_scale": noise_scale}
    if result.success:
        # The last frame lies up to `frame_every` env steps before success, so its chunk of actions reaches beyond it:
        # the expert's answer to the final state (to let go of the bowl) fills it up.
        labels += [expert.decide()[1]] * CHUNK_LENGTH
        episode = DemoEpisode(
            jpegs=frames,
            proprio=np.array(proprio, np.float32),
            frame_steps=np.array(steps, np.int64),
            actions=np.array(labels, np.float32),
            instruction=env.instruction,
            env_steps=result.env_steps,
            looks=looks,
            **drawn,
        )
        write_episode(episode_path(args.out, task_id, index), episode)
    outcome = "success" if result.success else "failure" if result.error is None else "fault"
    return drawn | {"index": index, "outcome": outcome, "env_steps": result.env_steps}


def noise_bursts(
    scale: float, num_steps: int, generator: np.random.Generator, motions: int = 6
) -> np.ndarray:
    """What is added to the motions of each env step, (num_steps, motions): bursts of noise, and zeros between them.

    A burst is an Ornstein-Uhlenbeck process with a standard deviation of `scale` x NOISE_WEIGHTS. The quiet between
    the bursts is for the labels' sake: there a chunk of labels is what was executed, so it leads where it is meant to.
    Under steady noise the later labels of a chunk would correct pushes that the policy could not foresee.
    """
    noise = np.zeros((num_steps, motions))
    step = int(generator.integers(*CLEAN_STEPS))
    while step < num_steps:
        push = generator.standard_normal(motions)
        for _ in range(generator.integers(*BURST_STEPS)):
            noise[step : step + 1] = scale * NOISE_WEIGHTS[:motions] * push
            push = NOISE_RHO * push + np.sqrt(1 - NOISE_RHO**2) * generator.standard_normal(motions)
            step += 1
        step += int(generator.integers(*CLEAN_STEPS))
    return noise


def main(argv: Sequence[str]) -> None:
    collect(parse_flags(DemosArgs, argv, prog="python -m workshop.demos"))


if __name__ == "__main__":
    sys.exit(main_guard("workshop.demos", main))
