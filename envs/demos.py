"""Collect demonstrations of the scripted expert: noisy episodes, labelled with what the expert wanted.

python -m envs.demos --out demonstrations/spatial --task-ids 0 1 --episodes 200 --num-envs 16

The same command goes on where it was stopped. Episode i of a task is the same whatever else is collected, by however
many processes. Failed ones are dropped, and remembered in attempts.jsonl. The initial states 40 .. 49 are held out for
evaluation unless --init-states says otherwise. File format: demonstrations.py.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import tyro

from command_line import answer_at_once, main_guard, parse_flags
from envs.demo_recipe import Recipe


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
    recipe: tyro.conf.OmitArgPrefixes[Recipe] = field(default_factory=Recipe)


parse = partial(parse_flags, DemosArgs, prog="python -m envs.demos")

if __name__ == "__main__":
    answer_at_once("envs.demos", parse)  # before the seconds that the imports below take

from demonstrations import episode_path
from envs.demo_episode import DemoEnv, attempt_of
from envs.libero import ChunkResult, EnvSpec, task_info
from envs.playing import Job, play_all
from envs.pool import make_pool
from envs.scripted import check_init_states
from errors import BadInput
from untrusted.json_file import as_object
from untrusted.plain_file import read_text

REPORT_EVERY_S = 10.0


def main(argv: Sequence[str]) -> None:
    arguments = parse(argv)
    collect(arguments.out, arguments.recipe, arguments.task_ids, arguments.episodes, arguments.num_envs)


def collect(folder: Path, recipe: Recipe, task_ids: Sequence[int], episodes: int, num_envs: int) -> Counter:
    """Play what the folder still lacks; returns how many episodes ended as success, failure and fault.

    A fault of the simulator is no failure of the expert: its episode is played again by the next collection.
    Raises BadInput for a recipe that cannot be, or is not that of the folder.
    """
    spec = EnvSpec(recipe.task_suite, tuple(task_ids), assets=recipe.assets)
    check_init_states(task_info(spec), *recipe.init_states)
    if recipe.frame_every < 1 or not recipe.noise_scales or min(recipe.noise_scales) < 0 or recipe.seed < 0:
        raise BadInput("--frame-every is 1 or more, --noise-scales and --seed are 0 or more")
    keep_recipe(folder / "recipe.json", recipe)
    attempts = folder / "attempts.jsonl"
    failed = failed_attempts(attempts)
    jobs = [
        Job(task_id, attempt_of(recipe, task_id, index).init_state_id, seed=index)
        for task_id in task_ids
        for index in range(episodes)
        if (task_id, index) not in failed and not episode_path(folder, task_id, index).exists()
    ]
    print(f"{folder}: {len(jobs)} of {len(task_ids) * episodes} episodes to play", flush=True)
    counts: Counter = Counter()
    if not jobs:
        return counts
    started = reported = time.monotonic()
    make_env = partial(DemoEnv, recipe, folder)
    with make_pool(spec, num_envs, make_env=make_env) as pool, attempts.open("a") as journal:
        for job, result in play_all(pool, jobs):
            counts[outcome(result)] += 1
            journal.write(json.dumps(entry(job, result, recipe)) + "\n")
            journal.flush()
            if time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                print(progress(counts, len(jobs), reported - started), flush=True)
    print(progress(counts, len(jobs), time.monotonic() - started))
    return counts


def keep_recipe(path: Path, recipe: Recipe) -> None:
    """Store the recipe of a new folder; raise BadInput if the folder is of another one."""
    text = json.dumps(asdict(recipe), indent=1) + "\n"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text(text)
        os.replace(draft, path)
    elif (found := read_text(path)) != text:
        stored = " ".join(found.split())
        raise BadInput(f"{path.parent} holds demonstrations of other settings: {stored}; use them or another --out")


def failed_attempts(journal: Path) -> set[tuple[int, int]]:
    """(task id, index) of the episodes that are known to fail. A line cut short by a crash is none.

    Raises BadInput for a journal that this program has not written.
    """
    failed = set()
    for number, line in enumerate(read_text(journal).splitlines() if journal.exists() else [], start=1):
        try:
            attempt = json.loads(line)
        except (ValueError, RecursionError):
            continue
        attempt = as_object(attempt, f"{journal}: line {number}")
        task_id, index = attempt.get("task_id"), attempt.get("index")
        if not (isinstance(task_id, int) and isinstance(index, int)):
            raise BadInput(f"{journal}: line {number} is no attempt of an episode; use another --out")
        if attempt.get("outcome") == "failure":
            failed.add((task_id, index))
    return failed


def outcome(result: ChunkResult) -> str:
    return "success" if result.success else "failure" if result.error is None else "fault"


def entry(job: Job, result: ChunkResult, recipe: Recipe) -> dict:
    return {
        "task_id": job.task_id,
        "index": job.seed,
        "init_state_id": job.init_state_id,
        "noise_scale": attempt_of(recipe, job.task_id, job.seed).noise_scale,
        "outcome": outcome(result),
        "env_steps": result.env_steps,
    }


def progress(counts: Counter, total: int, seconds: float) -> str:
    done = counts.total()
    return (
        f"{done}/{total} episodes: {counts['success']} demonstrations, {counts['failure']} failures, "
        f"{counts['fault']} faults; {done / seconds:.2f} episodes/s"
    )


if __name__ == "__main__":
    sys.exit(main_guard("envs.demos", main))
