"""Test a pool under stress: workers are killed and stopped, but no episode may be lost and no memory or process remain.

    python -m benchmarks.soak --episodes 200 --num-envs 4 --kill-every-s 20 --max-env-steps 80
    python -m benchmarks.soak --episodes 40 --num-envs 2 --kill-every-s 10 --max-env-steps 24 --recycle-after 10

Minutes of it stand for hours of a run. Prints what happened. Exit code 1 if an episode is missing, if a process takes
over 10 % more memory after the first quarter of the time than in it, or if a worker outlives the pool.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from benchmarks.background import repeated_beside
from benchmarks.stand_in import StandInPolicy
from envs.assets import find_pack
from envs.env import EnvSpec
from envs.pool import Pool
from rl.behaviour import Behaviour
from rl.randomness import Randomness
from rl.rollout import Rollout, play_episodes
from rl.trajectory import Episode

MIB = 2**20
MAX_GROWTH = 1.10  # of a process's memory, as a factor
WATCH_EVERY_S = 0.5  # seconds between two looks at the workers
NUM_INIT_STATES = 50


@dataclass(frozen=True)
class Args:
    episodes: int = 200
    num_envs: int = 4
    kill_every_s: float = 20.0
    max_env_steps: int = 80
    recycle_after: int = 20
    """Episodes after which a worker is replaced."""
    step_timeout_s: float = 10.0
    """Seconds after which a worker counts as hung."""


@dataclass(frozen=True)
class Sample:
    """What a process takes at one time."""

    memory_mib: float
    files: int
    threads: int
    largest_worker_mib: float


@dataclass
class Watch:
    """Kills the workers of a process, and records what it sees."""

    pid: int  # of the process
    find_workers: Callable[[], list[int]]
    kill_every_s: float
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    next_kill_s: float = field(default_factory=time.monotonic)
    first_seen_s: dict[int, float] = field(default_factory=dict)  # by process id of every worker
    kills: int = 0
    stopped_worker: int | None = None  # process id of the worker that was made to hang
    samples: list[Sample] = field(default_factory=list)

    def look(self) -> None:
        """Look at the process and its workers, and harm one of these every `kill_every_s`."""
        workers = self.find_workers()
        now = time.monotonic()
        for worker in workers:
            self.first_seen_s.setdefault(worker, now)
        with suppress(OSError):  # the process has ended
            process = Path(f"/proc/{self.pid}")
            files = len(list((process / "fd").iterdir()))
            threads = len(list((process / "task").iterdir()))
            largest_worker = max((resident_mib(worker) for worker in workers), default=0.0)
            self.samples.append(Sample(resident_mib(self.pid), files, threads, largest_worker))
        # Do not harm a worker that has just started, because an episode is given up after its third fault in a row.
        old_workers = [worker for worker in workers if now - self.first_seen_s[worker] >= self.kill_every_s]
        if old_workers and now >= self.next_kill_s:
            self.next_kill_s = now + self.kill_every_s
            self.harm(self.dice.choice(old_workers))

    def harm(self, worker: int) -> None:
        """Kill a worker. After the first kill stop one worker instead, so that it hangs."""
        with suppress(ProcessLookupError):
            if self.kills == 1 and self.stopped_worker is None:
                os.kill(worker, signal.SIGSTOP)
                self.stopped_worker = worker
            else:
                os.kill(worker, signal.SIGKILL)
                self.kills += 1


def child_processes() -> list[int]:
    """The process ids of this process's children."""
    pids: list[int] = []
    for listing in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            pids += [int(pid) for pid in listing.read_text().split()]
    return sorted(pids)


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB; 0 if it has just ended."""
    with suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / MIB
    return 0.0


def main(args: Args) -> int:
    assets = str(find_pack("lowpoly").folder)
    spec = EnvSpec("libero_spatial", (0,), assets=assets, max_env_steps=args.max_env_steps)
    episodes = [Episode(i, 0, i % NUM_INIT_STATES, group=i) for i in range(args.episodes)]
    behaviour = Behaviour(epsilon=0.0, temperature=1.0, keep_observations=False)
    watch = Watch(os.getpid(), child_processes, args.kill_every_s)
    pool = Pool(spec, args.num_envs, step_timeout_s=args.step_timeout_s, recycle_after=args.recycle_after)
    with pool, repeated_beside(watch.look, WATCH_EVERY_S):
        played = play_episodes(StandInPolicy(0.0), pool, episodes, behaviour, Randomness(0, "soak"))
    survivors = [pid for pid in watch.first_seen_s if Path(f"/proc/{pid}").exists()]
    return report(watch, played, survivors, args)


def report(watch: Watch, played: Rollout, survivors: Sequence[int], args: Args) -> int:
    """Print what happened; returns the exit code."""
    complete = [
        trajectory
        for trajectory in played.trajectories
        if trajectory.env_steps == args.max_env_steps or trajectory.success
    ]
    print(f"{len(complete)} of {args.episodes} episodes complete in {played.wall_s:.0f} s")
    print(
        f"{watch.kills} workers killed, {int(watch.stopped_worker is not None)} stopped; {played.errors} episodes "
        f"played again; {len(watch.first_seen_s)} worker processes in all"
    )
    this_process_grows = report_growth("this process", [sample.memory_mib for sample in watch.samples])
    worker_grows = report_growth("largest worker", [sample.largest_worker_mib for sample in watch.samples])
    print(f"{len(survivors)} workers left behind")
    is_incomplete = len(complete) < args.episodes
    return int(is_incomplete or this_process_grows or worker_grows or bool(survivors))


def report_growth(process: str, memory_mib: Sequence[float]) -> bool:
    """Print the peak memory of a process in two periods; returns whether it grows by more than MAX_GROWTH."""
    quarter = max(1, len(memory_mib) // 4)
    first_mib = max(memory_mib[:quarter])
    later_mib = max(memory_mib[quarter:])
    print(f"memory of {process}: {first_mib:.0f} MiB in the first quarter, {later_mib:.0f} MiB later")
    return later_mib > MAX_GROWTH * first_mib


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
