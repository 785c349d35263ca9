"""Whole iterations of `train_grpo.py` with simulators, in seconds of each part: one GPU, and several in both ways.

    python -m benchmarks.iteration FOLDER [--memory-budget 24] [--ways one accelerate]

FOLDER: a checkpoint, or the random 7B one that `python -m benchmarks.full_size FOLDER` writes. Two iterations of PPO,
each with at least 512 env steps and 10 epochs of optimizer steps of two samples; on G GPUs G times as many of all that,
so the ideal ratio of rates is G. The second is shown: in the first, passes are compiled and recorded. Random weights
never succeed; with an entropy term (`--entropy-coef`) all decisions are learned from all the same. What the runs print
goes to standard error.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
import tyro

ENVS_PER_GPU, EPISODE_STEPS = 8, 64
CHUNK = 8  # env steps that a decision covers
STEPS_PER_GPU = ENVS_PER_GPU * EPISODE_STEPS
FLAGS = (
    "--allow-zero-baseline --eval-interval 1000000 --eval-init-states 40 41 --entropy-coef 0.01 --n-epochs 10 "
    "--no-warmup --transition-steps 0 --wandb-mode disabled"
)


Way = Literal["one", "data-parallel", "accelerate"]


@dataclass(frozen=True)
class Args:
    checkpoint: tyro.conf.Positional[Path]
    memory_budget: float | None = 24.0
    """GiB of each GPU."""
    flags: str = ""
    """Further flags of train_grpo.py, as one string."""
    ways: tuple[Way, ...] = get_args(Way)
    """What is run, in this order; ratios are to `one` GPU, if that comes first. With one GPU there is no other way."""


def main(args: Args) -> None:
    gpus = torch.cuda.device_count()
    launcher = f"{sys.executable} -m accelerate.commands.launch --config_file configs/accelerate/one_machine.yaml"
    runs: dict[Way, tuple[str, str, int, int]] = {
        "one": ("one GPU", f"{sys.executable} train_grpo.py", 1, ENVS_PER_GPU),
        "data-parallel": (
            f"--data-parallel, {gpus} GPUs", f"{sys.executable} train_grpo.py --data-parallel", gpus,
            gpus * ENVS_PER_GPU,
        ),
        "accelerate": (
            f"accelerate launch, {gpus} ranks", f"{launcher} --num_processes {gpus} train_grpo.py", gpus, ENVS_PER_GPU
        ),
    }  # fmt: skip
    found: dict[Way, dict[str, float] | None] = {}
    for way in args.ways if gpus > 1 else ("one",):
        found[way] = measure(args, *runs[way], found.get("one"))
    if failed := [way for way, rates in found.items() if rates is None]:
        raise SystemExit(f"{len(failed)} of {len(found)} runs failed ({', '.join(failed)}): see above")


def measure(
    args: Args, name: str, command: str, gpus: int, num_envs: int, alone: dict[str, float] | None
) -> dict[str, float] | None:
    """Run it and print its last iteration. Returns the rates, None when the run has failed."""
    steps = gpus * STEPS_PER_GPU
    budget = [] if args.memory_budget is None else ["--memory-budget", str(args.memory_budget)]
    with tempfile.TemporaryDirectory() as output:
        done = subprocess.run(
            [
                *command.split(), "--checkpoint", str(args.checkpoint), "--output", output, *FLAGS.split(), *budget,
                "--num-envs", str(num_envs), "--max-env-steps", str(EPISODE_STEPS), "--n-steps", str(steps),
                "--total-steps", str(2 * steps),
                "--batch-size", str(2 * gpus), *args.flags.split(),
            ],
            env=None if gpus > 1 else one_gpu(), stdout=sys.stderr,
        )  # fmt: skip
        files = list(Path(output).glob("*/metrics.jsonl"))
        records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    if done.returncode != 0:
        print(f"{name}: exit code {done.returncode}", flush=True)
        return None
    return show(name, [record for record in records if "rollout/time_s" in record][-1], alone or {})


def one_gpu() -> dict[str, str]:
    """The environment in which the first visible GPU is the only one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": visible}


def show(name: str, record: dict[str, float], alone: dict[str, float]) -> dict[str, float]:
    """Print a record's seconds, memory and rates, these as ratios to those of one GPU, too. Returns the rates."""
    steps = record["rollout/env_steps_per_s"] * record["rollout/time_s"]
    samples = record["train/epochs"] * steps / CHUNK * (1 - record["train/zero_advantage_fraction"])
    rates = {
        "env steps/s": record["rollout/env_steps_per_s"],
        "update samples/s": samples / record["time/update"],
    }
    parts = ", ".join(f"{part} {record[f'time/{part}']:.1f}" for part in ("infer", "wait"))
    print(
        f"{name}: {steps:.0f} env steps in {record['rollout/time_s']:.1f} s (policy's process: {parts}), "
        f"{samples:.0f} samples learned in {record['time/update']:.1f} s, "
        f"checkpoint {record['time/checkpoint']:.1f} s, "
        f"peak {record.get('system/gpu_mem_gb', 0.0):.1f} GiB, first ratio error "
        f"{record['train/first_ratio_error']:.4f}"
    )
    for rate, value in rates.items():
        ratio = f", {value / alone[rate]:.2f} x one GPU" if alone else ""
        print(f"    {rate}: {value:.1f}{ratio}", flush=True)
    return rates


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
