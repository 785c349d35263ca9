"""Watch what a run takes of its machine while its simulators are killed and stopped: for benchmarks.kills."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """What a process takes at one time."""

    memory_mib: float
    files: int
    threads: int


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

    def sample_and_harm(self) -> None:
        """What is to be done again and again while the process runs."""
        self.take_sample()
        self.harm_when_due()

    def take_sample(self) -> None:
        """Record what the process takes now, unless it has ended."""
        with suppress(OSError):  # the process has ended
            process = Path(f"/proc/{self.pid}")
            pages = int((process / "statm").read_text().split()[1])
            memory_mib = pages * os.sysconf("SC_PAGESIZE") / MIB
            files = len(list((process / "fd").iterdir()))
            threads = len(list((process / "task").iterdir()))
            self.samples.append(Sample(memory_mib, files, threads))

    def harm_when_due(self) -> None:
        """Harm one of the workers every `kill_every_s`."""
        workers = self.find_workers()
        now = time.monotonic()
        for worker in workers:
            self.first_seen_s.setdefault(worker, now)
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
