"""SIGTERM at random moments of short runs, from their imports to their last evaluation: how does each run end?

    python -m benchmarks.interrupts train --times 30
    python -m benchmarks.interrupts train --times 30 --num-envs 2
    python -m benchmarks.interrupts eval --times 30

A run that has not printed its last line has to end with exit code 130 and one line on stderr. Prints those that do not,
with what they said; exit code 1 if there was one. The first run is left alone: the moments are drawn from its time.
"""

import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from configs.presets import TINY_CHECKPOINT

HEEDED_S = 0.5  # from here on the interpreter is up and the program's own handler is there
END_S = 60.0  # a run that takes longer to end hangs
LAST_LINE = {"train": "report ", "eval": "results: "}  # what remains is the interpreter's end, without the handler
FLAGS = {
    "train": (
        "train_grpo.py --preset tiny --total-steps 64 --warmup-steps 32 --transition-steps 0 --n-steps 16 "
        "--max-env-steps 16 --n-epochs 1 --eval-init-states 40 41 --allow-zero-baseline --wandb-mode offline --output"
    ),
    "eval": f"eval.py --checkpoint {TINY_CHECKPOINT} --task-ids 0 1 --trials 2 --video all --device cpu --out",
}


@dataclass(frozen=True)
class Arguments:
    program: tyro.conf.Positional[Literal["train", "eval"]]
    times: int = 30
    num_envs: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Ending:
    code: int | None  # None: it hung
    stderr: str
    seconds: float  # from the signal on

    @property
    def in_good_order(self) -> bool:
        return self.code == 130 and self.stderr.endswith(": interrupted\n") and self.stderr.count("\n") == 1


def main(arguments: Arguments) -> int:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        run(arguments, Path(folder, "straight"), None)
        whole_s = time.perf_counter() - started
        dice = random.Random(arguments.seed)
        endings = []
        for number in range(arguments.times):
            moment = dice.uniform(HEEDED_S, whole_s)
            ending = run(arguments, Path(folder, str(number)), moment)
            if ending is None:
                continue
            endings.append(ending)
            if not ending.in_good_order:
                print(f"after {moment:.1f} s: exit code {ending.code}\n{ending.stderr}", flush=True)
    in_good_order = sum(ending.in_good_order for ending in endings)
    print(
        f"{arguments.program}, {whole_s:.0f} s: {in_good_order} of {len(endings)} interrupts ended in one line; "
        f"{arguments.times - len(endings)} runs had ended before"
    )
    if endings:
        seconds = [ending.seconds for ending in endings]
        print(f"seconds to the end: median {statistics.median(seconds):.1f}, at most {max(seconds):.1f}")
    return int(in_good_order < len(endings))


def run(arguments: Arguments, out: Path, moment: float | None) -> Ending | None:
    """How a run ends that is interrupted at `moment` (s), if that was needed."""
    process = subprocess.Popen(
        [sys.executable, *FLAGS[arguments.program].split(), str(out), "--num-envs", str(arguments.num_envs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate(timeout=moment)
        if process.returncode != 0:
            raise RuntimeError(f"it failed by itself, exit code {process.returncode}: {errors}")
        return None
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    sent, code = time.perf_counter(), None
    try:
        output, errors = process.communicate(timeout=END_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
    if any(line.startswith(LAST_LINE[arguments.program]) for line in output.splitlines()):
        return None
    return Ending(code, errors, time.perf_counter() - sent)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
