"""Whole iterations of `train_grpo.py` with simulators: one GPU against all of them, which share rollout and update.

    python -m benchmarks.data_parallel FOLDER [--memory-budget 24] [--ways one ranks accelerate]
    python -m benchmarks.data_parallel checkpoints/tiny-libero-spatial --device cpu --memory-budget None --ways one

FOLDER: a checkpoint, or the random 7B one that `python -m benchmarks.full_size FOLDER` writes. `ranks` is
`--data-parallel`, which starts a process for every visible GPU. On G GPUs there are G times as many simulators,
env steps and samples, so the ideal ratio of rates is G. Medians over all iterations but the first, in which passes are
compiled and recorded. Random weights never succeed; with an entropy term all decisions are learned from all the same.
What the runs print goes to standard error.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import tyro

CHUNK = 8  # env steps that a decision covers
FLAGS = (
    "--allow-zero-baseline --eval-interval 1000000 --eval-init-states 40 41 --entropy-coef 0.01 --no-warmup "
    "--transition-steps 0 --wandb-mode disabled"
)
LAUNCHER = "-m accelerate.commands.launch --config_file configs/accelerate/one_machine.yaml"

Way = Literal["one", "ranks", "accelerate"]


@dataclass(frozen=True)
class Args:
    checkpoint: tyro.conf.Positional[Path]
    device: Literal["cuda", "cpu"] = "cuda"
    memory_budget: float | None = 24.0
    """GiB of each GPU."""
    ways: tuple[Way, ...] = ("one", "ranks")
    """What is run, in this order; ratios are to `one`, if that comes first. With one GPU there is no other way."""
    envs_per_gpu: int = 8
    episodes_per_env: int = 2
    """Of a rollout."""
    episode_steps: int = 64
    """Env steps of an episode."""
    n_epochs: int = 4
    batch_per_gpu: int = 2
    """Samples of an optimizer step."""
    iterations: int = 3
    flags: str = ""
    """Further flags of train_grpo.py, as one string (--flags="--lr 1e-5")."""


def main(args: Args) -> None:
    gpus = torch.cuda.device_count() if args.device == "cuda" else 1
    alone = None
    for way in args.ways if gpus > 1 else ("one",):
        rates = measure(args, way, 1 if way == "one" else gpus, alone)
        alone = rates if way == "one" else alone


def measure(args: Args, way: Way, gpus: int, alone: dict[str, float] | None) -> dict[str, float]:
    """Run train_grpo.py and show its iterations. Returns the rates."""
    steps = gpus * args.envs_per_gpu * args.episodes_per_env * args.episode_steps
    num_envs = args.envs_per_gpu  # each rank's
    budget = [] if args.memory_budget is None else ["--memory-budget", str(args.memory_budget)]
    launcher = [*LAUNCHER.split(), "--num_processes", str(gpus)] if way == "accelerate" else []
    with tempfile.TemporaryDirectory() as output:
        command = [
            sys.executable, *launcher, "train_grpo.py", *(["--data-parallel"] if way == "ranks" else []),
            "--checkpoint", str(args.checkpoint), "--device", args.device, "--output", output, *FLAGS.split(), *budget,
            "--num-envs", str(num_envs), "--max-env-steps", str(args.episode_steps), "--n-steps", str(steps),
            "--total-steps", str(args.iterations * steps), "--n-epochs", str(args.n_epochs),
            "--batch-size", str(args.batch_per_gpu * gpus), *args.flags.split(),
        ]  # fmt: skip
        done = subprocess.run(command, env=None if gpus > 1 else one_gpu(), stdout=sys.stderr)
        if done.returncode != 0:
            raise SystemExit(f"{way}: exit code {done.returncode}, see above")
        (metrics,) = Path(output).glob("*/metrics.jsonl")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    updates = [record for record in records if "rollout/time_s" in record]
    print(f"{way}, {gpus} GPU(s), {args.envs_per_gpu} simulators each:", flush=True)
    return show(updates[1:] or updates, alone)


def one_gpu() -> dict[str, str]:
    """The environment in which the first visible GPU is the only one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": visible}


def show(records: list[dict[str, float]], alone: dict[str, float] | None) -> dict[str, float]:
    """Print seconds, memory and rates of the iterations, the rates as ratios to those of one GPU, too."""

    def middle(name: str) -> float:
        return median(record.get(name, 0.0) for record in records)

    rates = {
        "env steps/s": middle("rollout/env_steps_per_s"),
        "update samples/s": median(samples_learned(record) / record["time/update"] for record in records),
    }
    for rate, value in rates.items():
        ratio = f", {value / alone[rate]:.2f} x one GPU" if alone else ""
        print(f"    {value:8.1f} {rate}{ratio}")
    print(
        f"    rollout {middle('rollout/time_s'):.1f} s (policy {middle('time/infer'):.1f}, waiting "
        f"{middle('time/wait'):.1f}), update {middle('time/update'):.1f} s, checkpoint "
        f"{middle('time/checkpoint'):.1f} s, peak {middle('system/gpu_mem_gb'):.1f} GiB, first ratio error "
        f"{middle('train/first_ratio_error'):.4f}",
        flush=True,
    )
    return rates


def samples_learned(record: dict[str, float]) -> float:
    decisions = record["rollout/env_steps_per_s"] * record["rollout/time_s"] / CHUNK
    return record["train/epochs"] * decisions * (1 - record["train/zero_advantage_fraction"])


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
