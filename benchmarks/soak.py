"""Hours of a pool in minutes: workers are killed and one is stopped, and nothing may be lost, leak or stay behind.

    python -m benchmarks.soak --episodes 200 --num-envs 4 --kill-every-s 20 --max-env-steps 80
    python -m benchmarks.soak --episodes 40 --num-envs 2 --kill-every-s 10 --max-env-steps 24 --recycle-after 10

Prints what happened; exit code 1 if an episode is missing, if a process's memory after the first quarter of the
episodes is later exceeded by more than 10 %, or if a worker outlives the pool.
"""

import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import tyro

from benchmarks.stand_in import StandInPolicy
from envs.assets import find_pack
from envs.env import EnvSpec
from envs.pool import Pool
from rl.behaviour import Behaviour
from rl.randomness import Randomness
from rl.rollout import play_episodes
from rl.trajectory import Episode

MIB = 2**20
MAX_GROWTH = 1.10


@dataclass(frozen=True)
class Arguments:
    task_suite: str = "libero_spatial"
    task_id: int = 0
    episodes: int = 200
    num_envs: int = 4
    kill_every_s: float = 20.0
    max_env_steps: int = 80
    recycle_after: int = 20
    """Episodes after which a worker is replaced."""
    step_timeout_s: float = 10.0
    """After which a worker counts as hung."""


@dataclass
class Watch:
    """What a second thread does to the workers and sees of them."""

    kill_every_s: float
    seen: dict[int, float] = field(
        default_factory=dict
    )  # process id of every worker -> when it was first seen
    kills: int = 0
    stopped: int | None = None  # the worker that was made to hang
    memory: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # (time, ours, largest worker's) in MiB
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        dice, next_kill = random.Random(0), time.monotonic() + self.kill_every_s
        while not self.over.wait(0.5):
            workers = children()
            for worker in workers:
                self.seen.setdefault(worker, time.monotonic())
            self.memory.append(
                (time.monotonic(), resident_mib(os.getpid()), max(map(resident_mib, workers), default=0.0))
            )
            # One that has only just started is spared: an episode is given up after its third fault in a row.
            old = [worker for worker in workers if time.monotonic() - self.seen[worker] >= self.kill_every_s]
            if old and time.monotonic() >= next_kill:
                next_kill = time.monotonic() + self.kill_every_s
                self.harm(dice.choice(old))

    def harm(self, worker: int) -> None:
        with suppress(ProcessLookupError):
            if self.kills == 1 and self.stopped is None:
                os.kill(worker, signal.SIGSTOP)
                self.stopped = worker
            else:
                os.kill(worker, signal.SIGKILL)
                self.kills += 1


def children() -> list[int]:
    pids = []
    for listing in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            pids += map(int, listing.read_text().split())
    return sorted(pids)


def resident_mib(pid: int) -> float:
    """Resident memory; 0 for a process that has just gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / MIB
    return 0.0


def main(arguments: Arguments) -> int:
    spec = EnvSpec(arguments.task_suite, (arguments.task_id,), max_env_steps=arguments.max_env_steps)
    spec = replace(spec, assets=str(find_pack(spec.assets).folder))
    episodes = [Episode(i, arguments.task_id, i % 50, i) for i in range(arguments.episodes)]
    watch = Watch(arguments.kill_every_s)
    thread = threading.Thread(target=watch.run, daemon=True)
    quarter_done = None
    steps_done = 0

    def on_steps(executed: int) -> None:
        nonlocal quarter_done, steps_done
        steps_done += executed
        if quarter_done is None and steps_done >= arguments.episodes * arguments.max_env_steps / 4:
            quarter_done = time.monotonic()

    behaviour = Behaviour(epsilon=0.0, temperature=1.0, keep_observations=False)
    with Pool(
        spec,
        arguments.num_envs,
        step_timeout_s=arguments.step_timeout_s,
        recycle_after=arguments.recycle_after,
    ) as pool:
        thread.start()
        played = play_episodes(
            StandInPolicy(0.0), pool, episodes, behaviour, Randomness(0, "soak"), on_steps=on_steps
        )
        watch.over.set()
        thread.join()
    left = [pid for pid in watch.seen if Path(f"/proc/{pid}").exists()]
    return report(watch, played, left, quarter_done, arguments)


def report(watch: Watch, played, left: list[int], quarter_done: float, arguments: Arguments) -> int:
    complete = [t for t in played.trajectories if t.env_steps == arguments.max_env_steps or t.success]
    print(f"{len(complete)} of {arguments.episodes} episodes complete in {played.wall_s:.0f} s")
    print(f"{watch.kills} workers killed, {int(watch.stopped is not None)} stopped; ", end="")
    print(f"{played.errors} episodes played again; {len(watch.seen)} worker processes in all")
    grown = False
    for column, whose in ((1, "this process"), (2, "largest worker")):
        before = max(sample[column] for sample in watch.memory if sample[0] <= quarter_done)
        after = max(sample[column] for sample in watch.memory if sample[0] > quarter_done)
        grown |= after > MAX_GROWTH * before
        print(f"memory of {whose}: {before:.0f} MiB in the first quarter, {after:.0f} MiB later")
    print(f"{len(left)} workers left behind")
    return int(len(complete) < arguments.episodes or grown or bool(left))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
