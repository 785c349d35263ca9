"""Collect demonstrations of a scripted expert whose hand is as uneven as a person's, with bursts of noise in between.

python -m workshop.demos --out demonstrations/spatial --task-ids 0 1 --episodes 200 --num-envs 16

The same command continues a collection that was interrupted. Episode i of a task is the same whatever else is
collected, by however many processes. Episodes that fail are dropped, and remembered in attempts.jsonl. To measure how
often the expert succeeds in the states of evaluations: --episodes 50 --init-states 0 50 --noise-scales 0.
The file format is described in workshop/demo_files.py. LIBERO's expert is ours (workshop/expert.py). It puts a black
bowl onto a plate, a stove or a cabinet: all tasks of libero_spatial, and three of libero_goal that share one scene, in
which only the instruction says where the bowl is to go (1: stove, 4: top of the cabinet, 8: plate):

    python -m workshop.demos --out demonstrations/goal --task-suite libero_goal --task-ids 1 4 8
"""

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from command_line import main_guard, parse_flags
from configs.bounds import (
    NOT_NEGATIVE,
    POSITIVE,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    check_numbers,
)
from contracts import BadInput, output_place, read_json, write_json
from envs.assets import find_pack
from envs.env import EnvSpec
from envs.libero import LiberoEnv
from envs.pool import task_info
from envs.worker import InlineWorker, NoAnswer, ProcessWorker, Worker
from experiment.terminal import say, show_progress
from workshop.demo_files import CHUNK_LENGTH, RECIPE_FILE, episode_path, write_episode
from workshop.label_shares import describe, fullest_bins, labels_of
from workshop.noisy_episode import CLEAN_STEPS, Attempt, record_episode

JOURNAL_FILE = "attempts.jsonl"
EPISODE_S = 3600.0  # more than any episode takes

# Streams of random numbers, so that no choice depends on how many numbers another one draws.
PLACEMENT_STREAM = 1
MOVE_STREAM = 2

Outcome = Literal["success", "failure", "fault"]


@dataclass(frozen=True)
class DemosArgs:
    """Collect demonstrations of the scripted expert: its uneven motions, with bursts of noise in between."""

    out: Path
    """Folder to write, or to go on with."""
    task_ids: tuple[NonNegativeInt, ...] = (0,)
    """Task ids within the suite."""
    episodes: Annotated[int, POSITIVE] = 200
    """Episodes to play per task; most of them succeed."""
    num_envs: Annotated[int, POSITIVE] = 1
    """Simulators: 1 steps inline, N > 1 run in worker processes, an episode in each."""
    task_suite: str = "libero_spatial"
    """Suite of the tasks. The expert knows all tasks of libero_spatial, and tasks 1, 4 and 8 of libero_goal."""
    init_states: tuple[NonNegativeInt, NonNegativeInt] | Literal["fresh"] = "fresh"
    """`fresh`: LIBERO's placement sampler draws one for every episode, and the benchmark's are all held out; or first
    and one-past-last of the benchmark's initial states."""
    noise_scales: tuple[NonNegativeFloat, ...] = (0.3, 0.6, 0.9, 1.2)
    """Standard deviations, as shares of full action, of the bursts of noise on the executed moves; the episodes take
    them in turn."""
    frame_every: Annotated[int, POSITIVE] = 4
    """Env steps between two frames, where the chunk of a frame is free of noise."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of everything random."""
    move_objects: tuple[PositiveFloat, ...] = ()
    """Distances in cm: every episode draws one of them, or none, and moves the objects so far before it starts."""
    assets: str = "lowpoly"
    """What objects look like: `lowpoly`, `official` or a folder."""

    def recipe(self) -> dict[str, object]:
        """All settings that decide an episode of a given task and index, as JSON stores them."""
        left_out = {"out", "task_ids", "episodes", "num_envs"}
        recipe = {name: value for name, value in vars(self).items() if name not in left_out}
        return json.loads(json.dumps(recipe))

    def env_spec(self, task_ids: tuple[int, ...]) -> EnvSpec:
        """The simulator with all cameras."""
        return EnvSpec(self.task_suite, task_ids, assets=self.assets)


def collect(args: DemosArgs) -> Counter[str]:
    """Play what the folder still lacks; returns how many episodes ended as success, failure and fault.

    A fault of the simulator is no failure of the expert: the next collection plays that episode again.
    Raises BadInput for wrong arguments, and for a folder of other settings.
    """
    spec = args.env_spec(args.task_ids)
    check_flags(args, spec)
    find_pack(spec.assets)  # unpack looks now, rather than in all workers at the same time
    with output_place(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
        check_recipe(args)
        attempts = missing_attempts(args)
        num_episodes = len(args.task_ids) * args.episodes
        print(f"{args.out}: {len(attempts)} of {num_episodes} episodes to play", flush=True)
        counts: Counter[str] = Counter()
        with (
            (args.out / JOURNAL_FILE).open("a") as journal,
            show_progress("collecting", len(attempts), "episodes") as activity,
        ):
            for attempt, outcome, env_steps in play_attempts(args, attempts):
                counts[outcome] += 1
                line = {
                    "task_id": attempt.task_id,
                    "init_state_id": attempt.init_state_id,
                    "noise_scale": attempt.noise_scale,
                    "index": attempt.index,
                    "outcome": outcome,
                    "env_steps": env_steps,
                }
                journal.write(json.dumps(line) + "\n")
                journal.flush()
                activity.count_episode(outcome == "success")
    outcomes = ", ".join(f"{counts[name]} {name}" for name in ("success", "failure", "fault"))
    seconds = time.monotonic() - activity.started
    print(f"{len(attempts)} episodes in {seconds:.1f} s: {outcomes}", flush=True)
    return counts


def check_flags(args: DemosArgs, spec: EnvSpec) -> None:
    """Raise BadInput for values that cannot be played: no noise scale, an unknown task or initial state."""
    check_numbers(args)
    if not args.noise_scales:
        raise BadInput("--noise-scales needs at least one number; 0 is no noise")
    num_stored = min(task.num_init_states for task in task_info(spec))
    if args.init_states == "fresh":
        return
    first, end = args.init_states
    if not 0 <= first < end <= num_stored:
        raise BadInput(f"--init-states {first} {end}: the tasks have 0 .. {num_stored}; END is left out")


def check_recipe(args: DemosArgs) -> None:
    """Write the settings into a new folder. Raises BadInput if it was begun with others."""
    path = args.out / RECIPE_FILE
    if not path.exists():
        write_json(path, args.recipe())
    stored = read_json(path)
    if stored != args.recipe():
        raise BadInput(
            f"{args.out} holds demonstrations of other settings: {stored}; use them or another --out"
        )


def missing_attempts(args: DemosArgs) -> list[Attempt]:
    """The episodes that are neither stored nor known to fail."""
    failed = failed_episodes(args.out / JOURNAL_FILE)
    return [
        attempt_of(args, task_id, index)
        for task_id, index in product(args.task_ids, range(args.episodes))
        if (task_id, index) not in failed and not episode_path(args.out, task_id, index).exists()
    ]


def failed_episodes(journal: Path) -> set[tuple[int, int]]:
    """(task id, index) of the episodes that are known to fail. A damaged line is ignored."""
    if not journal.exists():
        return set()
    failed = set()
    for line in journal.read_text().splitlines():
        with suppress(ValueError, TypeError, KeyError):
            played = json.loads(line)
            if played["outcome"] == "failure":
                failed.add((played["task_id"], played["index"]))
    return failed


def play_attempts(args: DemosArgs, attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, Outcome, int]]:
    """Play episodes in this process or in worker processes; yields each attempt, how it ended and its env steps.

    A worker that dies, or misses its deadline, is replaced; its episode ends as a fault.
    """
    worker_class: type[Worker] = InlineWorker if args.num_envs == 1 else ProcessWorker
    waiting = deque(attempts)
    idle: list[Worker] = []
    at_work: dict[Worker, Attempt] = {}
    try:
        while waiting or at_work:
            while waiting and len(at_work) < args.num_envs:
                worker = idle.pop() if idle else worker_class(Player, args)
                at_work[worker] = waiting.popleft()
                worker.request(at_work[worker], timeout_s=EPISODE_S)
            until_s = min(worker.deadline for worker in at_work)
            answered = worker_class.wait(list(at_work), max(0.0, until_s - time.monotonic()))
            late = [worker for worker in at_work if worker.deadline <= time.monotonic()]
            for worker in answered or late:
                attempt = at_work[worker]
                try:
                    outcome, env_steps = worker.receive()
                    idle.append(worker)
                except NoAnswer as reason:
                    say(f"task {attempt.task_id}, episode {attempt.index}: the simulator's process: {reason}")
                    worker.close()
                    worker.end()
                    outcome = "fault"
                    env_steps = 0
                del at_work[worker]
                yield attempt, outcome, env_steps
    finally:
        for worker in (*idle, *at_work):
            worker.close()


class Player:
    """Plays attempts, and writes the episodes that succeed. The simulator of the last task stays built."""

    def __init__(self, args: DemosArgs) -> None:
        self._args = args
        self._env: LiberoEnv | None = None
        self._pack = find_pack(args.env_spec(args.task_ids).assets)

    def __call__(self, attempt: Attempt) -> tuple[Outcome, int]:
        """Play an episode; returns how it ended, and after how many env steps."""
        env = self._env_of(attempt.task_id)
        result, episode = record_episode(env, attempt, self._args.frame_every, self._pack.looks)
        if episode is None:
            return "failure" if result.error is None else "fault", result.env_steps
        with output_place(self._args.out):
            write_episode(episode_path(self._args.out, attempt.task_id, attempt.index), episode)
        return "success", result.env_steps

    def _env_of(self, task_id: int) -> LiberoEnv:
        if self._env is None or self._env.task_id != task_id:
            self.close()
            spec = self._args.env_spec((task_id,))
            self._env = LiberoEnv(replace(spec, assets=str(self._pack.folder)), task_id)
        return self._env

    def close(self) -> None:
        """Free the simulator."""
        if self._env is not None:
            self._env.close()


def attempt_of(args: DemosArgs, task_id: int, index: int) -> Attempt:
    """The episode `index` of a task, a function of the arguments alone.

    The benchmark's initial states take turns, and from round to round each meets another of the noise scales.
    """
    generator = np.random.default_rng([args.seed, task_id, index])
    move_generator = np.random.default_rng([args.seed, task_id, index, MOVE_STREAM])
    init_state_id = None
    if args.init_states == "fresh":
        placement_generator = np.random.default_rng([args.seed, task_id, index, PLACEMENT_STREAM])
        seed = int(placement_generator.integers(2**32))
        turn = index
    else:
        first, end = args.init_states
        round_index, state_index = divmod(index, end - first)
        init_state_id = first + state_index
        seed = 0  # in the benchmark's states fixtures stand where evaluation puts them
        turn = round_index + state_index
    return Attempt(
        task_id=task_id,
        index=index,
        init_state_id=init_state_id,
        seed=seed,
        noise_scale=args.noise_scales[turn % len(args.noise_scales)],
        first_frame=int(generator.integers(min(args.frame_every, CLEAN_STEPS[0] - CHUNK_LENGTH + 1))),
        noise_generator=generator,
        moved_cm=float(move_generator.choice((0.0, *args.move_objects))),
        move_generator=move_generator,
    )


def main(argv: Sequence[str]) -> None:
    args = parse_flags(DemosArgs, argv, prog="python -m workshop.demos")
    collect(args)
    print(describe(fullest_bins(labels_of(args.out))))


if __name__ == "__main__":
    # Workers are sent this module's functions by name, and their own __main__ is another.
    from workshop import demos

    sys.exit(main_guard("workshop.demos", demos.main))
