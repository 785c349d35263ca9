"""How often does the scripted expert succeed?

python -m envs.scripted                                            # the 50 initial states of each libero_spatial task
python -m envs.scripted --task-ids 0 1 --init-states 40 50 --num-envs 8
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from command_line import answer_at_once, main_guard, parse_flags


@dataclass(frozen=True)
class ScriptedArgs:
    """How often does the scripted expert succeed?"""

    task_suite: str = "libero_spatial"
    """LIBERO suite that the tasks belong to."""
    task_ids: tuple[int, ...] = tuple(range(10))
    """Task ids within the suite."""
    init_states: tuple[int, int] = (0, 50)
    """First and one-past-last of the benchmark's initial states to start from, one episode each."""
    assets: str = "lowpoly"
    """What objects look like: `lowpoly`, `official` or a folder."""
    num_envs: int = 1
    """Simulators: 1 steps inline, N > 1 run in worker processes, an episode in each."""


parse = partial(parse_flags, ScriptedArgs, prog="python -m envs.scripted")

if __name__ == "__main__":
    answer_at_once("envs.scripted", parse)  # before the seconds that the imports below take

from envs.libero import ChunkResult, EnvSpec, task_info
from envs.playing import EpisodeEnv, Job, play_all
from envs.pool import make_pool
from envs.tasks import TaskInfo
from errors import BadInput


def main(argv: Sequence[str]) -> None:
    arguments = parse(argv)
    spec = EnvSpec(arguments.task_suite, arguments.task_ids, assets=arguments.assets)
    tasks = task_info(spec)
    init_states = check_init_states(tasks, *arguments.init_states)
    jobs = [Job(task.task_id, init_state_id) for task in tasks for init_state_id in init_states]
    outcomes: dict[Job, ChunkResult] = {}
    with make_pool(spec, arguments.num_envs, make_env=EpisodeEnv) as pool:
        for job, result in play_all(pool, jobs):
            outcomes[job] = result
            task = tasks[arguments.task_ids.index(job.task_id)]
            own = {j.init_state_id: outcomes[j] for j in outcomes if j.task_id == task.task_id}
            if len(own) == len(init_states):
                print(summary(task, own), flush=True)


def check_init_states(tasks: Sequence[TaskInfo], first: int, end: int) -> range:
    """The initial states first .. end - 1. Raises BadInput if a task lacks some of them."""
    stored = min(task.num_init_states for task in tasks)
    if not 0 <= first < end <= stored:
        raise BadInput(
            f"--init-states {first} {end}: the tasks have 0 .. {stored}; give FIRST and END, which is left out"
        )
    return range(first, end)


def summary(task: TaskInfo, outcomes: dict[int, ChunkResult]) -> str:
    """One line about the outcomes of a task, by initial state."""
    steps = [result.env_steps for result in outcomes.values() if result.success]
    failed = sorted(init_state_id for init_state_id, result in outcomes.items() if not result.success)
    length = f"median {statistics.median(steps):3.0f} max {max(steps):3} env steps" if steps else "no success"
    failures = f"  failed from {', '.join(map(str, failed))}" if failed else ""
    return f"{task.task_id:>2}  {len(steps):>2}/{len(outcomes)}  {length}  {task.instruction}{failures}"


if __name__ == "__main__":
    sys.exit(main_guard("envs.scripted", main))
