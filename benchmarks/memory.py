"""Main memory of a simulator's process by suite and looks, MiB resident: at rest after a chunk, and at most.

python -m benchmarks.memory                                       # one task, then three that are kept built
python -m benchmarks.memory --suites libero_10 --num-tasks 1
"""

import argparse
import re
from pathlib import Path

import numpy as np

from envs.env import EnvSpec
from envs.libero import LiberoEnv
from envs.slot import Reset, SlotEnv
from envs.tasks import MAX_ENV_STEPS
from envs.worker import ask


def resident_mib(suite: str, num_tasks: int, assets: str) -> list[int]:
    """Play a chunk of each task in this process; what is resident then, and what was at most."""
    slot = SlotEnv(EnvSpec(suite, tuple(range(num_tasks)), assets=assets), LiberoEnv)
    for task_id in range(num_tasks):
        slot(Reset(task_id, init_state_id=0))
        slot(np.zeros((8, 7)))
    status = Path("/proc/self/status").read_text()
    return [int(re.findall(rf"{name}:\s+(\d+)", status)[0]) // 1024 for name in ("VmRSS", "VmHWM")]


if __name__ == "__main__":
    from benchmarks.memory import resident_mib as question  # another process knows it by its module's name

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="+", choices=MAX_ENV_STEPS, default=list(MAX_ENV_STEPS))
    parser.add_argument("--num-tasks", nargs="+", type=int, default=[1, 3])
    arguments = parser.parse_args()
    print("suite           tasks   official  at most   lowpoly  at most")
    for suite in arguments.suites:
        for num_tasks in arguments.num_tasks:
            found = [
                ask(question, suite, num_tasks, assets, answer_s=600.0) for assets in ("official", "lowpoly")
            ]
            (official, peak), (lowpoly, lowpoly_peak) = found
            print(f"{suite:15}{num_tasks:6}{official:11}{peak:9}{lowpoly:10}{lowpoly_peak:9}", flush=True)
