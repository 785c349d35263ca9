"""Fast physics beside exact: speed, deviation, and success of the scripted expert, as a Markdown table.

    python -m benchmarks.physics --num-envs 30                       # 10 tasks of libero_spatial, 2,000 episodes
    python -m benchmarks.physics --suites libero_object libero_goal libero_10 --episodes 1 --num-envs 30

Deviation: the hand pushes about on the table at random in exact and in fast physics in turns, and, as contacts multiply
any difference, in exact physics with one joint turned by 1e-12 rad (nudged). Nothing is rendered. The expert, without
noise, plays the same fresh states in both (`episodes` a task), if the task is to put a black bowl onto a plate.
"""

import statistics
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context

import numpy as np
import tyro

from contracts import BadInput
from envs.assets import find_pack
from envs.env import EnvSpec
from envs.libero import LiberoEnv
from envs.tasks import task_names
from experiment.statistics import compare

MARKS = (8, 80, 220)  # env steps; 220 is the least step limit of a suite
BLOCK = 20  # episodes for which a simulator is built
Task = tuple[str, int]


def make_env(task: Task) -> closing[LiberoEnv]:
    suite, task_id = task
    return closing(LiberoEnv(EnvSpec(suite, (task_id,)), task_id))


def deviate(task: Task) -> str:
    """At each mark the largest deviations so far; medians of the speeds, and their ratio."""
    seconds, found, largest, generator = [], [], np.zeros((2, 2)), np.random.default_rng(0)
    with make_env(task) as exact, make_env(task) as fast, make_env(task) as nudged:
        for env in (exact, fast, nudged):
            env.reset(0, observe=False, physics="fast" if env is fast else "exact")
        nudged.domain.sim.data.qpos[0] += 1e-12
        bodies = [exact.domain.obj_body_id[name] for name in exact.domain.objects_dict]
        for env_steps in range(4, MARKS[-1] + 1, 4):
            push = np.tile(generator.uniform(-1, 1, 7) - [0, 0, 0.5, 0, 0, 0, 0], (4, 1))
            seconds.append([env.step_chunk(push, observe=False).sim_s / 4 for env in (exact, fast, nudged)])
            data = [env.domain.sim.data for env in (exact, fast, nudged)]
            places = np.array([[d.get_site_xpos("gripper0_grip_site"), *d.body_xpos[bodies]] for d in data])
            shifts = np.linalg.norm(places[1:] - places[0], axis=-1)  # (fast or nudged, hand and objects)
            largest = np.maximum(largest, np.maximum.reduceat(shifts, [0, 1], axis=1))
            if env_steps in MARKS:
                found.append("{:.2g}, {:.2g} ({:.2g}, {:.2g})".format(*(1000 * largest).ravel()))
    ours, theirs, _ = map(statistics.median, zip(*seconds, strict=True))
    return " | ".join([*found, f"{1 / ours:.0f}, {1 / theirs:.0f}: {ours / theirs:.2f}"])


def play(task: Task, seeds: range) -> list[tuple[str, tuple[Task, int], bool]]:
    """Physics, episode, success: of the expert's episodes, without faults and tasks that it cannot play."""
    from workshop.expert import Expert  # imports mujoco, which the first env has to precede

    ends = []
    with make_env(task) as env:
        for seed, physics in ((seed, physics) for seed in seeds for physics in ("exact", "fast")):
            result = env.reset(None, seed, observe=False, physics=physics)
            try:
                expert = Expert(env.domain)
            except BadInput:
                break
            while not result.done:
                result = env.step_chunk(expert.decide()[1][None], observe=False)
            ends += [(physics, (task, seed), result.success)] * (result.error is None)
    return ends


def main(
    suites: tuple[str, ...] = ("libero_spatial",), task_ids: tuple[int, ...] = (), episodes: int = 100,
    num_envs: int = 1,
) -> None:  # fmt: skip
    find_pack("lowpoly")  # made once, here
    tasks = [(suite, task_id) for suite in suites for task_id in task_ids or range(len(task_names(suite)))]
    blocks = [(t, range(i, min(i + BLOCK, episodes))) for t in tasks for i in range(0, episodes, BLOCK)]
    print(
        "| task | mm hand, objects (nudged) after 8 env steps | 80 | 220 | env steps/s exact, fast: ratio | expert |"
    )
    print("|---|---|---|---|---|---|")
    with ProcessPoolExecutor(num_envs, get_context("spawn")) as executor:
        measured = executor.map(deviate, tasks)
        ends = [end for part in executor.map(play, *zip(*blocks, strict=True)) for end in part]
    for task, columns in (*zip(tasks, measured, strict=True), (None, "| | | ")):
        exact, fast = (
            {k: s for p, k, s in ends if p == which and task in (None, k[0])} for which in ("exact", "fast")
        )
        pair = compare(exact, fast)
        expert = f"exact {pair.before}, fast {pair.after}: {pair}" if pair.n else "-"
        print(f"| {' '.join(map(str, task or ['all']))} | {columns} | {expert} |")


if __name__ == "__main__":
    tyro.cli(main)
