"""Collect demonstrations of a scripted expert whose hand is as uneven as a person's, with bursts of noise in between.

python -m workshop.demos --out demonstrations/spatial --task-ids 0 1 --episodes 200 --num-envs 16

The same command continues a collection that was interrupted. Episode i of a task is the same whatever else is
collected, by however many processes. Episodes that fail are dropped. The file format is described in
workshop/demo_files.py. LIBERO's expert is ours (workshop/expert.py). It puts a black bowl onto a plate, a stove or a
cabinet: all tasks of libero_spatial, and three of libero_goal that share one scene, in which only the instruction says
where the bowl is to go (1: stove, 4: top of the cabinet, 8: plate):

    python -m workshop.demos --out demonstrations/goal --task-suite libero_goal --task-ids 1 4 8
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from command_line import main_guard, parse_flags
from configs.bounds import (
    NOT_NEGATIVE,
    POSITIVE,
    NonNegativeInt,
    PositiveFloat,
    check_fields,
)
from contracts import BadInput, locked, output_place, read_json, write_json
from envs.assets import find_pack
from envs.env import EnvSpec
from envs.libero import LiberoEnv
from envs.libero_imports import simulator_versions
from envs.pool import task_info
from envs.worker import NoAnswer, ProcessWorker
from experiment.terminal import say, show_progress
from workshop.demo_files import RECIPE_FILE, episode_path, list_episodes, write_episode
from workshop.noisy_episode import attempt_of, record_episode

EPISODE_S = 3600.0  # more than any episode takes

EpisodeId = tuple[int, int]  # task id, index among the episodes of the task
Outcome = Literal["success", "failure", "fault"]  # a fault is one of the simulator, not of the expert


@dataclass(frozen=True)
class DemosArgs:
    """Collect demonstrations of the scripted expert: its uneven motions, with bursts of noise in between.

    Every episode starts from a placement of its own; the benchmark's initial states are all held out.
    """

    # Folder to write, or to go on with.
    out: Path
    # Task ids within the suite.
    task_ids: tuple[NonNegativeInt, ...] = (0,)
    # Episodes to play per task; most of them succeed.
    episodes: Annotated[int, POSITIVE] = 200
    # Simulators, each in a process of its own.
    num_envs: Annotated[int, POSITIVE] = 1
    # Suite of the tasks. The expert knows all tasks of libero_spatial, and tasks 1, 4 and 8 of libero_goal.
    task_suite: str = "libero_spatial"
    # Seed of everything random.
    seed: Annotated[int, NOT_NEGATIVE] = 0
    # Distances in cm: every episode draws one of them, or none, and moves the objects so far before it starts.
    move_objects: tuple[PositiveFloat, ...] = ()
    # What objects look like: `lowpoly`, `official` or a folder.
    assets: str = "lowpoly"

    def recipe(self) -> dict[str, object]:
        """All that decides an episode of a given task and index, as JSON stores it."""
        left_out = {"out", "task_ids", "episodes", "num_envs"}
        recipe = {name: value for name, value in vars(self).items() if name not in left_out}
        return json.loads(json.dumps(recipe | {"simulator": simulator_versions()}))


def collect(args: DemosArgs) -> Counter[str]:
    """Play what the folder still lacks; returns how many episodes had each outcome.

    Raises BadInput for wrong arguments, and for a folder of other settings.
    """
    check_fields(args)
    task_info(EnvSpec(args.task_suite, args.task_ids))  # refuses unknown tasks
    find_pack(args.assets)  # unpack looks now, rather than in all workers at the same time
    counts: Counter[str] = Counter(success=0, failure=0, fault=0)
    with output_place(args.out), locked(args.out / ".lock", f"--out {args.out}"):
        check_recipe(args)
        missing = [
            (task_id, index)
            for task_id, index in product(args.task_ids, range(args.episodes))
            if not episode_path(args.out, task_id, index).exists()
        ]
        say(f"{args.out}: {len(missing)} of {len(args.task_ids) * args.episodes} episodes to play")
        with show_progress("collecting", len(missing), "episodes") as activity:
            for outcome in play_all(args, missing):
                counts[outcome] += 1
                activity.count_episode(outcome == "success")
    say(f"{len(missing)} episodes played: {', '.join(f'{counts[name]} {name}' for name in counts)}")
    return counts


def check_recipe(args: DemosArgs) -> None:
    """Write the settings into a new folder. Raises BadInput if it was begun with others, or in another simulator."""
    path = args.out / RECIPE_FILE
    recipe = args.recipe()
    if not path.exists():
        write_json(path, recipe)
    stored = read_json(path)
    differing = [name for name, value in recipe.items() if stored.get(name) != value]
    if differing:
        raise BadInput(
            f"{args.out} holds demonstrations of another {', '.join(differing)}: {stored}; use these or another --out"
        )


def play_all(args: DemosArgs, episode_ids: Sequence[EpisodeId]) -> Iterator[Outcome]:
    """Play episodes, each in one of `args.num_envs` processes; yields how each one ended, as they end.

    Raises BadInput if a process dies, or hangs for EPISODE_S.
    """
    waiting = list(reversed(episode_ids))
    workers = [ProcessWorker(Player, args) for _ in range(min(args.num_envs, len(waiting)))]
    try:
        for worker in workers:
            worker.request(waiting.pop(), timeout_s=EPISODE_S)
        busy = list(workers)
        while busy:
            for worker in ProcessWorker.wait(busy, EPISODE_S) or list(busy):
                yield worker.receive()
                if waiting:
                    worker.request(waiting.pop(), timeout_s=EPISODE_S)
                else:
                    busy.remove(worker)
    except NoAnswer as reason:
        raise BadInput(f"a simulator's process: {reason}; the same command plays what is missing") from None
    finally:
        for worker in workers:
            worker.close()


class Player:
    """Plays episodes, and writes those that succeed. The simulator of the last task stays built."""

    def __init__(self, args: DemosArgs) -> None:
        self._args = args
        self._env: LiberoEnv | None = None
        self._pack = find_pack(args.assets)

    def __call__(self, episode_id: EpisodeId) -> Outcome:
        """Play an episode; returns how it ended."""
        args = self._args
        task_id, index = episode_id
        if self._env is None or self._env.task_id != task_id:
            self.close()
            spec = EnvSpec(args.task_suite, (task_id,), assets=str(self._pack.folder))
            self._env = LiberoEnv(spec, task_id)
        attempt = attempt_of(self._env, args.seed, index, args.move_objects)
        result, episode = record_episode(self._env, attempt, self._pack.looks)
        if episode is None:
            return "failure" if result.error is None else "fault"
        with output_place(args.out):
            write_episode(episode_path(args.out, task_id, index), episode)
        return "success"

    def close(self) -> None:
        """Free the simulator."""
        if self._env is not None:
            self._env.close()


def main(argv: Sequence[str]) -> None:
    args = parse_flags(DemosArgs, argv, prog="python -m workshop.demos")
    collect(args)
    list_episodes(args.out)  # raises BadInput if there is none


if __name__ == "__main__":
    # Workers are sent this module's functions by name, and their own __main__ is another.
    from workshop import demos

    sys.exit(main_guard("workshop.demos", demos.main))
