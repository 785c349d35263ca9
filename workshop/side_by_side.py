"""Run this project's own programs side by side on the cores and GPUs of one machine."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from contracts import BadInput


def run_side_by_side(programs: Mapping[Path, Sequence[str]], at_once: int) -> None:
    """Log file -> programs to run one after the other; at most `at_once` of these at the same time.

    The GPUs take turns. Raises BadInput if a program fails.
    """
    num_gpus = max(1, torch.cuda.device_count())
    gpus = [index % num_gpus for index in range(len(programs))]
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(run, programs.keys(), programs.values(), gpus))


def run(log: Path, programs: Sequence[str], gpu: int | None = None) -> None:
    """Run programs one after the other, on one GPU or on all. Raises BadInput with the end of its output if one fails.

    A program is what follows `python`.
    """
    # Programs that each take all cores for their tensors wait for one another: a third of the env steps/s was left.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    log.parent.mkdir(parents=True, exist_ok=True)
    for program in programs:
        print(f"python {program}", flush=True)
        command = [sys.executable, *shlex.split(program)]
        with log.open("a") as output:
            ended = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        if ended.returncode != 0:
            last_lines = "\n".join(log.read_text().splitlines()[-5:])
            raise BadInput(f"python {program} ended with {ended.returncode}: {log}\n{last_lines}")
