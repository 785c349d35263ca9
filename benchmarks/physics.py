"""Compare fast physics with exact physics: speed, deviation, and the scripted expert's success, as a Markdown table.

    python -m benchmarks.physics --num-envs 30                       # 10 tasks of libero_spatial, 2,000 episodes
    python -m benchmarks.physics --suites libero_object libero_goal libero_10 --episodes 1 --num-envs 30

Deviation: the hand makes the same random pushes on the table in exact physics, in fast physics, and in exact physics
with one joint turned by 1e-12 rad ("nudged"). The last one shows how much contacts alone amplify any small difference.
Nothing is rendered. Success: the expert plays `episodes` fresh initial states of each task in both physics, without
noise. Tasks that the expert does not know are left out. `benchmarks.policy_physics` plays a policy in both.
"""

import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from typing import Annotated, Literal, NamedTuple

import numpy as np

from command_line import main_guard, parse_flags
from configs.bounds import POSITIVE, check_numbers
from contracts import BadInput
from envs.assets import find_pack
from envs.env import ChunkResult, EnvSpec, Start
from envs.libero import LiberoEnv
from envs.tasks import task_names
from experiment.statistics import compare
from workshop.expert import Expert

MARKS = (8, 80, 220)  # env steps at which deviations are printed; 220 is the smallest step limit of a suite
PUSH_STEPS = 4  # env steps of one random push
NUDGE_RAD = 1e-12
BLOCK = 20  # episodes that are played with one built simulator
NOT_MEASURED = "simulator fault | - | - | -"  # the columns of `measure_deviation`


class Task(NamedTuple):
    suite: str
    task_id: int


class ExpertEpisode(NamedTuple):
    """The outcome of an expert's episode in which the simulator did not fail."""

    physics: Literal["exact", "fast"]
    task: Task
    seed: int
    success: bool


@dataclass(frozen=True)
class Args:
    suites: tuple[str, ...] = ("libero_spatial",)
    task_ids: tuple[int, ...] = ()
    """Task ids in every suite; none: all."""
    episodes: Annotated[int, POSITIVE] = 100
    """Episodes of the expert, per task and physics."""
    num_envs: Annotated[int, POSITIVE] = 1
    """Processes that work in parallel."""

    def __post_init__(self) -> None:
        check_numbers(self)


def open_env(task: Task) -> closing[LiberoEnv]:
    return closing(LiberoEnv(EnvSpec(task.suite, (task.task_id,)), task.task_id))


def measure_deviation(task: Task) -> str:
    """Columns of the table: the largest deviations in mm up to each mark; env steps/s and their ratio.

    NOT_MEASURED if a simulator fails.
    """
    generator = np.random.default_rng(0)
    seconds = []  # for every push: seconds per env step of (exact, fast, nudged)
    largest = np.zeros((2, 2))  # metres; rows (fast, nudged), columns (hand, objects)
    columns = []
    with open_env(task) as exact, open_env(task) as fast, open_env(task) as nudged:
        envs = (exact, fast, nudged)
        starts = (Start(0), Start(0, physics="fast"), Start(0))
        results = [env.reset(start, observe=False) for env, start in zip(envs, starts, strict=True)]
        if any_fault(results):
            return NOT_MEASURED
        nudged.domain.sim.data.qpos[0] += NUDGE_RAD
        for env_steps in range(PUSH_STEPS, MARKS[-1] + 1, PUSH_STEPS):
            push = generator.uniform(-1, 1, 7) - [0, 0, 0.5, 0, 0, 0, 0]
            actions = np.tile(push, (PUSH_STEPS, 1))
            results = [env.step_chunk(actions, observe=False) for env in envs]
            if any_fault(results):
                return NOT_MEASURED
            seconds.append([result.sim_s / PUSH_STEPS for result in results])
            largest = np.maximum(largest, deviations(envs))
            if env_steps in MARKS:
                columns.append("{:.2g}, {:.2g} ({:.2g}, {:.2g})".format(*(1000 * largest).ravel()))
    exact_s, fast_s, _ = (median(values) for values in zip(*seconds, strict=True))
    columns.append(f"{1 / exact_s:.0f}, {1 / fast_s:.0f}: {exact_s / fast_s:.2f}")
    return " | ".join(columns)


def any_fault(results: Iterable[ChunkResult]) -> bool:
    return any(result.error is not None for result in results)


def deviations(envs: Sequence[LiberoEnv]) -> np.ndarray:
    """How far the hand and the objects of each other env are from those of the first: (len(envs) - 1, 2), metres.

    The column of the objects is the largest distance of any object.
    """
    first = envs[0].domain
    bodies = [first.obj_body_id[name] for name in first.objects_dict]
    positions = []
    for env in envs:
        data = env.domain.sim.data
        positions.append([data.get_site_xpos("gripper0_grip_site"), *data.body_xpos[bodies]])
    places = np.array(positions)
    shifts = np.linalg.norm(places[1:] - places[0], axis=-1)
    return np.stack([shifts[:, 0], shifts[:, 1:].max(axis=1)], axis=1)


def play_expert(task: Task, seeds: range) -> list[ExpertEpisode]:
    """Let the expert play one episode per seed in both physics; returns none for a task that it does not know."""
    episodes = []
    with open_env(task) as env:
        for seed in seeds:
            for physics in ("exact", "fast"):
                result = env.reset(Start(None, seed, physics=physics), observe=False)
                if result.error is not None:
                    continue  # a failed env has no domain for the expert to read
                try:
                    expert = Expert(env.domain)
                except BadInput:
                    return []
                while not result.done:
                    result = env.step_chunk(expert.decide()[None], observe=False)
                if result.error is None:
                    episodes.append(ExpertEpisode(physics, task, seed, result.success))
    return episodes


def compare_successes(episodes: Iterable[ExpertEpisode]) -> str:
    """The table's column of the expert: successes in both physics, and their paired difference."""
    successes: dict[str, dict[tuple[Task, int], bool]] = {"exact": {}, "fast": {}}
    for episode in episodes:
        successes[episode.physics][episode.task, episode.seed] = episode.success
    pair = compare(successes["exact"], successes["fast"])
    return f"exact {pair.before}, fast {pair.after}: {pair}" if pair.n else "-"


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.physics", description=__doc__)
    find_pack("lowpoly")  # unpack the pack now, rather than in all processes at the same time
    tasks = []
    for suite in args.suites:
        tasks += [Task(suite, task_id) for task_id in args.task_ids or range(len(task_names(suite)))]
    blocks = []
    for task in tasks:
        for start in range(0, args.episodes, BLOCK):
            blocks.append((task, range(start, min(start + BLOCK, args.episodes))))
    print(
        "| task | mm hand, objects (nudged) after 8 env steps | 80 | 220 | env steps/s exact, fast: ratio | expert |"
    )
    print("|---|---|---|---|---|---|")
    with ProcessPoolExecutor(args.num_envs, get_context("spawn")) as executor:
        deviation_columns = executor.map(measure_deviation, tasks)
        played_blocks = executor.map(play_expert, *zip(*blocks, strict=True))
        episodes = [episode for block in played_blocks for episode in block]
    for task, columns in zip(tasks, deviation_columns, strict=True):
        expert = compare_successes(episode for episode in episodes if episode.task == task)
        print(f"| {task.suite} {task.task_id} | {columns} | {expert} |")
    print(f"| all | | | |  | {compare_successes(episodes)} |")


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.physics", main))
