"""Run this project's own programs side by side on the cores and GPUs of one machine."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from queue import SimpleQueue

from contracts import BadInput
from envs.worker import PR_SET_PDEATHSIG
from vla.device import count_gpus


def run_side_by_side(programs: Mapping[Path, Sequence[str]], at_once: int) -> None:
    """Log file -> programs to run one after the other; at most `at_once` of these at the same time.

    Each log file's programs take the visible GPU that was given back first. If a program fails, the others are run all
    the same; then BadInput is raised.
    """
    gpus: SimpleQueue[str | None] = SimpleQueue()
    for gpu in islice(cycle(visible_gpus()), at_once):
        gpus.put(gpu)

    def run_on_next_gpu(log: Path, chain: Sequence[str]) -> None:
        gpu = gpus.get()
        try:
            run(log, chain, gpu)
        finally:
            gpus.put(gpu)

    with ThreadPoolExecutor(at_once) as threads:
        runs = [threads.submit(run_on_next_gpu, log, chain) for log, chain in programs.items()]
    for ended in runs:
        ended.result()


def visible_gpus() -> list[str | None]:
    """The GPUs that torch sees, as CUDA_VISIBLE_DEVICES names them. [None] if there are none: it stays as it is."""
    num_gpus = count_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = chosen.split(",") if chosen else [str(index) for index in range(num_gpus)]
    return [*names[:num_gpus]] or [None]


def run(log: Path, programs: Sequence[str], gpu: str | None = None) -> None:
    """Run programs one after the other, on one GPU or (None) on all. A program is what follows `python`.

    Raises BadInput with the end of its output if one fails.
    """
    # Programs that each take all cores for their tensors wait for one another: a third of the env steps/s was left.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    log.parent.mkdir(parents=True, exist_ok=True)
    for program in programs:
        print(f"python {program}", flush=True)
        command = [sys.executable, *shlex.split(program)]
        with log.open("a") as output:
            ended = subprocess.run(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                # It gets no signal from the terminal, but one from the kernel when this program ends: a second one
                # would end it before it has saved its results.
                start_new_session=True,
                preexec_fn=partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        if ended.returncode != 0:
            last_lines = "\n".join(log.read_text().splitlines()[-5:])
            raise BadInput(f"python {program} ended with {ended.returncode}: {log}\n{last_lines}")
