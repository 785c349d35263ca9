"""How often does the scripted expert succeed?

python -m envs.scripted                                            # the 50 initial states of each libero_spatial task
python -m envs.scripted --task-ids 0 1 --init-states 40 50 --num-envs 8
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

from envs.libero import ChunkResult, EnvSpec, task_info
from envs.playing import EpisodeEnv, Job, play_all
from envs.pool import make_pool
from envs.tasks import TaskInfo
from errors import BadInput


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.scripted", description=__doc__.splitlines()[0])
    parser.add_argument("--task-suite", default="libero_spatial")
    parser.add_argument("--task-ids", type=int, nargs="+", default=list(range(10)), metavar="ID")
    parser.add_argument("--init-states", type=int, nargs=2, default=(0, 50), metavar=("FIRST", "END"))
    parser.add_argument("--assets", default="lowpoly", help="lowpoly, official or a folder")
    parser.add_argument("--num-envs", type=int, default=1, help="episodes side by side, one process each")
    arguments = parser.parse_args(argv)

    spec = EnvSpec(arguments.task_suite, tuple(arguments.task_ids), assets=arguments.assets)
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
    try:
        main(sys.argv[1:])
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
