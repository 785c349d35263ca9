"""What each part of the method is worth on the bundled small policy: variants x seeds of train_grpo.py.

    python -m benchmarks.learning --variants default gae --parallel 4 --num-envs 4 --out runs/learning
    python -m benchmarks.learning --list

Every run has the same number of env steps and the settings of `--preset tiny`, except for the flags that its variant
names (VARIANTS below) and those after `--`. Finished runs are not repeated. Per run OUT/VARIANT/ gets seed_S.jsonl (its
metrics), seed_S.json (its configuration) and, if it failed, the reason in seed_S.log; `python -m
benchmarks.learning_report OUT` makes tables and pictures of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

GROUPS = ("--group-size", "8")
PHASES = ("--warmup", "--advantage", "absolute")

VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    # advantages
    "rloo": ("--advantage", "rloo", *GROUPS),
    "group": ("--advantage", "group", *GROUPS),
    "gae": ("--advantage", "gae"),
    "absolute": ("--advantage", "absolute"),
    # phases
    "phases": PHASES,
    "phases-batch": ("--warmup",),
    "warmup-only": (*PHASES, "--warmup-steps", "40000"),
    # exploration
    "t0.4": ("--temperature", "0.4"),
    "t1.0": ("--temperature", "1.0"),
    # steps
    "lr-6e-4": ("--lr", "6e-4"),
    "exact-physics": ("--physics", "exact"),
}


@dataclass(frozen=True)
class Job:
    number: int
    variant: str
    seed: int
    flags: tuple[str, ...]


def main() -> int:
    argv, extra = sys.argv[1:], []
    if "--" in argv:
        argv, extra = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    arguments = parse(argv)
    if arguments.list:
        for name, flags in VARIANTS.items():
            print(f"{name:24} {' '.join(flags)}")
        return 0
    pairs = [(variant, seed) for seed in arguments.seeds for variant in arguments.variants]
    jobs = [Job(number, variant, seed, (*VARIANTS[variant], *extra)) for number, (variant, seed) in enumerate(pairs)]
    todo = [job for job in jobs if not (arguments.out / job.variant / f"seed_{job.seed}.jsonl").exists()]
    print(f"{len(todo)} of {len(jobs)} runs to do, {arguments.parallel} at a time", flush=True)
    started = time.monotonic()
    failed = 0
    with ThreadPoolExecutor(arguments.parallel) as threads:
        for job, outcome in threads.map(lambda job: (job, run(job, arguments)), todo):
            failed += outcome != "done"
            print(f"{time.monotonic() - started:6.0f} s  {job.variant} seed {job.seed}: {outcome}", flush=True)
    return int(failed > 0)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side")
    parser.add_argument("--num-envs", type=int, default=2, help="simulators of each run")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that the runs take in turn")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--list", action="store_true", help="show the variants and end")
    return parser.parse_args(argv)


def run(job: Job, arguments: argparse.Namespace) -> str:
    """Train once and keep what the report needs; returns "done" or the last line of the log."""
    results, scratch = arguments.out / job.variant, arguments.out / "scratch" / f"{job.variant}-{job.seed}"
    results.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    command = [sys.executable, "train_grpo.py", "--preset", "tiny", "--seed", str(job.seed)]
    command += ["--num-envs", str(arguments.num_envs), "--output", str(scratch), "--wandb-mode", "disabled", *job.flags]
    log = results / f"seed_{job.seed}.log"
    with log.open("w") as output:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}  # the runs share the cores
        if arguments.gpus:
            env["CUDA_VISIBLE_DEVICES"] = str(job.number % arguments.gpus)
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=env, check=False).returncode
    if code != 0:
        return f"exit code {code}: {(log.read_text().strip().splitlines() or ['(no output)'])[-1]}"
    (folder,) = scratch.iterdir()
    shutil.copy(folder / "config.json", results / f"seed_{job.seed}.json")
    shutil.copy(folder / "metrics.jsonl", results / f"seed_{job.seed}.jsonl")
    shutil.rmtree(scratch)
    log.unlink()
    return "done"


if __name__ == "__main__":
    sys.exit(main())
