"""Collect demonstrations of a scripted expert: noisy episodes, labelled with what the expert wanted to do.

python -m workshop.demos --out demonstrations/spatial --task-ids 0 1 --episodes 200 --num-envs 16

The same command continues a collection that was interrupted. Episode i of a task is the same whatever else is
collected, by however many processes. Episodes that fail are dropped, and remembered in attempts.jsonl. To measure how
often the expert succeeds in the states of evaluations: --episodes 50 --init-states 0 50 --noise-scales 0.
The file format is described in workshop/demo_files.py. LIBERO's expert is ours (workshop/expert.py). It puts a black
bowl onto a plate, a stove or a cabinet: all tasks of libero_spatial, and three of libero_goal that share one scene, in
which only the instruction says where the bowl is to go (1: stove, 4: top of the cabinet, 8: plate):

    python -m workshop.demos --out demonstrations/goal --task-suite libero_goal --task-ids 1 4 8

--task-suite metaworld_mt50 uses Meta-World's experts, for all of its tasks.
"""

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from command_line import main_guard, parse_flags
from configs.bounds import NOT_NEGATIVE, POSITIVE, check_numbers
from configs.config import MAGNITUDE, SimulatorConfig
from contracts import BadInput, output_place, read_json, write_json
from envs.assets import METAWORLD_LOOKS, find_pack
from envs.env import EnvSpec
from envs.libero import LiberoEnv
from envs.metaworld import MetaWorldEnv
from envs.perturb import NONE, Kind, Perturbation, from_label
from envs.pool import make_env, task_info
from envs.tasks import METAWORLD
from envs.worker import ProcessWorker
from experiment.terminal import show_progress
from workshop.demo_files import CHUNK_LENGTH, RECIPE_FILE, DemoEpisode, episode_path, write_episode
from workshop.noisy_episode import CLEAN_STEPS, Attempt, record_episode

JOURNAL_FILE = "attempts.jsonl"
EPISODE_S = 3600.0  # more than any episode takes

# Streams of random numbers, so that no choice depends on how many numbers another one draws.
PLACEMENT_STREAM = 1
PERTURBATION_STREAM = 2

Outcome = Literal["success", "failure", "fault"]
EpisodeId = tuple[int, int]  # task id, and the index among the episodes of that task


@dataclass(frozen=True)
class DemosArgs:
    """Collect demonstrations of the scripted expert: noisy episodes, labelled with what the expert wanted."""

    out: Path
    """Folder to write, or to go on with."""
    task_ids: Annotated[tuple[int, ...], NOT_NEGATIVE] = (0,)
    """Task ids within the suite."""
    episodes: Annotated[int, POSITIVE] = 200
    """Episodes to play per task; most of them succeed."""
    num_envs: Annotated[int, POSITIVE] = 1
    """Simulators: 1 steps inline, N > 1 run in worker processes, an episode in each."""
    task_suite: str = "libero_spatial"
    """Suite that the tasks belong to. The expert knows all tasks of libero_spatial and metaworld_mt50, and tasks 1, 4
    and 8 of libero_goal."""
    init_states: Annotated[tuple[int, int] | Literal["fresh"], NOT_NEGATIVE] = "fresh"
    """`fresh`: LIBERO's placement sampler draws one for every episode, and the benchmark's are all held out; or first
    and one-past-last of the benchmark's initial states."""
    noise_scales: Annotated[tuple[float, ...], NOT_NEGATIVE] = (0.3, 0.6, 0.9, 1.2)
    """Standard deviations, as shares of full action, of the bursts of noise on the executed moves; the episodes take
    them in turn."""
    frame_every: Annotated[int, POSITIVE] = 4
    """Env steps between two frames, where the chunk of a frame is free of noise."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of everything random."""
    perturb: tuple[Kind, ...] = ()
    """Kinds of change to LIBERO's world (docs/OWN_TASKS.md); every episode draws one of them, or none."""
    magnitudes: Annotated[tuple[int, ...], MAGNITUDE] = (1, 3, 5)
    """How far they go, in steps of 1 to 5."""
    assets: str = "lowpoly"
    """What LIBERO's objects look like: `lowpoly`, `official` or a folder."""

    def recipe(self) -> dict[str, object]:
        """All settings that decide an episode of a given task and index, as JSON stores them."""
        left_out = {"out", "task_ids", "episodes", "num_envs"}
        recipe = {name: value for name, value in vars(self).items() if name not in left_out}
        return json.loads(json.dumps(recipe))

    def env_spec(self, task_ids: tuple[int, ...]) -> EnvSpec:
        """The simulator with all cameras that the suite has."""
        if self.task_suite == METAWORLD:
            return EnvSpec(self.task_suite, task_ids, num_images=1, assets=METAWORLD_LOOKS)
        return EnvSpec(self.task_suite, task_ids, assets=self.assets)


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended: a line of attempts.jsonl."""

    task_id: int
    init_state_id: int  # -1: a fresh one
    noise_scale: float
    index: int
    outcome: Outcome
    env_steps: int


def collect(args: DemosArgs) -> Counter[str]:
    """Play what the folder still lacks; returns how many episodes ended as success, failure and fault.

    A fault of the simulator is no failure of the expert: the next collection plays that episode again.
    Raises BadInput for wrong arguments, and for a folder of other settings.
    """
    spec = args.env_spec(args.task_ids)
    check_init_states(args, spec)
    check_numbers(args)
    find_pack(spec.assets)  # unpack looks now, rather than in all workers at the same time
    with output_place(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
        check_recipe(args)
        episode_ids = missing_episodes(args)
        num_episodes = len(args.task_ids) * args.episodes
        print(f"{args.out}: {len(episode_ids)} of {num_episodes} episodes to play", flush=True)
        counts: Counter[str] = Counter()
        with (
            (args.out / JOURNAL_FILE).open("a") as journal,
            show_progress("collecting", len(episode_ids), "episodes") as activity,
        ):
            for played in play_attempts(args, episode_ids):
                counts[played.outcome] += 1
                journal.write(json.dumps(asdict(played)) + "\n")
                journal.flush()
                activity.count_episode(played.outcome == "success")
    outcomes = ", ".join(f"{counts[name]} {name}" for name in ("success", "failure", "fault"))
    seconds = time.monotonic() - activity.started
    print(f"{len(episode_ids)} episodes in {seconds:.1f} s: {outcomes}", flush=True)
    return counts


def check_init_states(args: DemosArgs, spec: EnvSpec) -> None:
    """Raise BadInput if a task is unknown or lacks some of the initial states."""
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


def missing_episodes(args: DemosArgs) -> list[EpisodeId]:
    """The episodes that are neither stored nor known to fail."""
    failed = failed_episodes(args.out / JOURNAL_FILE)
    return [
        episode_id
        for episode_id in product(args.task_ids, range(args.episodes))
        if episode_id not in failed and not episode_path(args.out, *episode_id).exists()
    ]


def failed_episodes(journal: Path) -> set[EpisodeId]:
    """The episodes that are known to fail. A damaged line is ignored."""
    if not journal.exists():
        return set()
    failed = set()
    for line in journal.read_text().splitlines():
        with suppress(ValueError, TypeError, KeyError):
            played = json.loads(line)
            if played["outcome"] == "failure":
                failed.add((played["task_id"], played["index"]))
    return failed


def play_attempts(args: DemosArgs, episode_ids: Sequence[EpisodeId]) -> Iterator[AttemptResult]:
    """Play the episodes in this process or in worker processes; yields results as the episodes end."""
    if args.num_envs == 1:
        yield from map(partial(play_attempt, args), episode_ids)
        return
    workers = [ProcessWorker(partial, play_attempt, args) for _ in episode_ids[: args.num_envs]]
    busy = list(workers)
    waiting = deque(episode_ids)
    try:
        for worker in workers:
            worker.request(waiting.popleft(), timeout_s=EPISODE_S)
        while busy:
            for worker in ProcessWorker.wait(busy, EPISODE_S):
                yield worker.receive()
                if waiting:
                    worker.request(waiting.popleft(), timeout_s=EPISODE_S)
                else:
                    busy.remove(worker)
    finally:
        for worker in workers:
            worker.close()


def attempt_of(args: DemosArgs, task_id: int, index: int) -> Attempt:
    """The episode `index` of a task, a function of the arguments alone.

    The benchmark's initial states take turns, and from round to round each meets another of the noise scales.
    """
    generator = np.random.default_rng([args.seed, task_id, index])
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
        init_state_id=init_state_id,
        seed=seed,
        noise_scale=args.noise_scales[turn % len(args.noise_scales)],
        first_frame=int(generator.integers(min(args.frame_every, CLEAN_STEPS[0] - CHUNK_LENGTH + 1))),
        noise_generator=generator,
        perturbation=draw_perturbation(args, task_id, index),
    )


def draw_perturbation(args: DemosArgs, task_id: int, index: int) -> Perturbation | None:
    """How the world of an episode is perturbed, a function of the arguments alone."""
    labels = (NONE, *SimulatorConfig(perturb=args.perturb, magnitudes=args.magnitudes).perturbations)
    generator = np.random.default_rng([args.seed, task_id, index, PERTURBATION_STREAM])
    label = str(generator.choice(labels))
    return from_label(label, int(generator.integers(2**32)))


def play_attempt(args: DemosArgs, episode_id: EpisodeId) -> AttemptResult:
    """Play an episode, and write it if it succeeds."""
    task_id, index = episode_id
    attempt = attempt_of(args, task_id, index)
    env, looks = _env_and_looks(args.env_spec((task_id,)))
    result, recording = record_episode(env, attempt, args.frame_every)
    stored_id = -1 if attempt.init_state_id is None else attempt.init_state_id
    if result.success:
        episode = DemoEpisode(
            jpegs=recording.jpegs,
            proprio=np.array(recording.proprio, np.float32),
            frame_steps=np.array(recording.frame_steps, np.int64),
            actions=np.array(recording.labels, np.float32),
            instruction=env.instruction,
            env_steps=result.env_steps,
            looks=looks,
            task_id=task_id,
            init_state_id=stored_id,
            noise_scale=attempt.noise_scale,
        )
        with output_place(args.out):
            write_episode(episode_path(args.out, task_id, index), episode)
        outcome: Outcome = "success"
    else:
        outcome = "failure" if result.error is None else "fault"
    return AttemptResult(task_id, stored_id, attempt.noise_scale, index, outcome, result.env_steps)


@lru_cache(1)  # building a simulator takes seconds: keep that of the last task
def _env_and_looks(spec: EnvSpec) -> tuple[LiberoEnv | MetaWorldEnv, str]:
    pack = find_pack(spec.assets)
    env = make_env(replace(spec, assets=str(pack.folder)), spec.task_ids[0])
    return env, pack.looks


def main(argv: Sequence[str]) -> None:
    collect(parse_flags(DemosArgs, argv, prog="python -m workshop.demos"))


if __name__ == "__main__":
    # Workers are sent this module's functions by name, and their own __main__ is another.
    from workshop import demos

    sys.exit(main_guard("workshop.demos", demos.main))
