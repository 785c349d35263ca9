"""Measure the main memory of a simulator's process, in MiB: after a chunk, and at most; by suite and asset pack.

python -m benchmarks.memory                                       # with one task, then with three that stay built
python -m benchmarks.memory --suites libero_10 --num-tasks 1
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from command_line import main_guard
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from envs.slot import SlotEnv
from envs.tasks import MAX_ENV_STEPS
from envs.worker import ask


def resident_mib(suite: str, num_tasks: int, assets: str) -> tuple[int, int]:
    """Play a chunk of each task in this process; returns (resident memory at the end, its peak), both in MiB."""
    slot = SlotEnv(EnvSpec(suite, tuple(range(num_tasks)), assets=assets), LiberoEnv)
    for task_id in range(num_tasks):
        slot((task_id, Start(0)))
        slot(np.zeros((8, 7)))
    status = Path("/proc/self/status").read_text()
    return _status_mib(status, "VmRSS"), _status_mib(status, "VmHWM")


def _status_mib(status: str, name: str) -> int:
    (kib,) = re.findall(rf"{name}:\s+(\d+)", status)
    return int(kib) // 1024


def main(argv: Sequence[str]) -> None:
    # Import the function from its module, because the other process finds it by that name. In this file it belongs to
    # __main__, which is another program there.
    from benchmarks.memory import resident_mib as resident_mib_of

    parser = argparse.ArgumentParser("benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="+", choices=MAX_ENV_STEPS, default=list(MAX_ENV_STEPS))
    parser.add_argument("--num-tasks", nargs="+", type=int, default=[1, 3])
    arguments = parser.parse_args(argv)
    print("suite           tasks   official  at most   lowpoly  at most")
    for suite in arguments.suites:
        for num_tasks in arguments.num_tasks:
            official, official_peak = ask(resident_mib_of, suite, num_tasks, "official", answer_s=600.0)
            lowpoly, lowpoly_peak = ask(resident_mib_of, suite, num_tasks, "lowpoly", answer_s=600.0)
            print(
                f"{suite:15}{num_tasks:6}{official:11}{official_peak:9}{lowpoly:10}{lowpoly_peak:9}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.memory", main))
