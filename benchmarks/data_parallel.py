"""Time whole iterations of `train_grpo.py` with simulators on one GPU and on all GPUs, which share the work.

    python -m benchmarks.data_parallel FOLDER [--memory-budget 24]
    python -m benchmarks.data_parallel checkpoints/tiny-libero-spatial --device cpu --memory-budget None --ways one

FOLDER: a checkpoint, or the random 7B one that `python -m benchmarks.full_size FOLDER` writes. The way `ranks` is
`--data-parallel`, which starts a process for every visible GPU. On G GPUs there are G times as many simulators, env
steps and samples, so the ideal ratio of rates is G. The printed numbers are medians over all iterations except the
first, in which the network's passes are compiled and recorded. Random weights never succeed, so an entropy term makes
the update learn from all decisions anyway. What the runs print goes to standard error.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import tyro

from command_line import handle_stop_signals, main_guard, parse_flags
from configs.bounds import POSITIVE, check_numbers
from contracts import BadInput
from experiment.run_files import MetricsRow, read_metrics
from workshop.demo_files import CHUNK_LENGTH

FLAGS = (
    "--allow-zero-baseline --eval-interval 1000000 --eval-init-states 40 41 --entropy-coef 0.01 --no-warmup "
    "--transition-steps 0 --physics exact --wandb-mode disabled"
)

Way = Literal["one", "ranks"]


@dataclass(frozen=True)
class Args:
    checkpoint: tyro.conf.Positional[Path]
    device: Literal["cuda", "cpu"] = "cuda"
    memory_budget: float | None = 24.0
    """--memory-budget of the runs, GiB of each GPU."""
    ways: tuple[Way, ...] = ("one", "ranks")
    """Ways to run, in this order; ratios are to `one`, if it comes first. With one GPU only `one` is run."""
    envs_per_gpu: Annotated[int, POSITIVE] = 8
    episodes_per_env: Annotated[int, POSITIVE] = 2
    """Episodes of each env in a rollout."""
    episode_steps: Annotated[int, POSITIVE] = 64
    """Env steps of an episode."""
    n_epochs: Annotated[int, POSITIVE] = 4
    batch_per_gpu: Annotated[int, POSITIVE] = 2
    """Samples of an optimizer step on each GPU."""
    iterations: Annotated[int, POSITIVE] = 3

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True)
class Rates:
    env_steps_per_s: float
    samples_per_s: float


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.data_parallel", description=__doc__)
    handle_stop_signals(signal.default_int_handler)  # so that temporary files are removed
    compare_ways(args)


def compare_ways(args: Args) -> None:
    """Run each way, and print its rates beside those of one GPU. Raises BadInput if there is no GPU to run on."""
    import torch

    num_gpus = torch.cuda.device_count() if args.device == "cuda" else 1
    if num_gpus == 0:
        raise BadInput(
            "torch sees no CUDA GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
            "--device cpu --memory-budget None"
        )
    ways = args.ways if num_gpus > 1 else ("one",)
    one_gpu_rates = None
    for way in ways:
        gpus = 1 if way == "one" else num_gpus
        updates = run_training(args, way, gpus)
        rates = measure_rates(updates)
        print(f"{way}, {gpus} GPU(s), {args.envs_per_gpu} simulators each:", flush=True)
        print_rates(rates, one_gpu_rates)
        print_times(updates)
        if way == "one":
            one_gpu_rates = rates


def run_training(args: Args, way: Way, gpus: int) -> list[MetricsRow]:
    """Run train_grpo.py; returns the metrics of its updates, without the first one if there are several.

    Raises SystemExit if the run fails.
    """
    with tempfile.TemporaryDirectory() as output:
        command = training_command(args, way, gpus, output)
        finished = subprocess.run(command, env=one_gpu_environ() if gpus == 1 else None, stdout=sys.stderr)
        if finished.returncode != 0:
            raise SystemExit(f"{way}: exit code {finished.returncode}, see above")
        (metrics,) = Path(output).glob("*/metrics.jsonl")
        updates = [row for row in read_metrics(metrics) if "rollout/time_s" in row]
    return updates[1:] or updates


def training_command(args: Args, way: Way, gpus: int, output: str) -> list[str]:
    """The command line of a run on `gpus` GPUs."""
    n_steps = gpus * args.envs_per_gpu * args.episodes_per_env * args.episode_steps
    settings: dict[str, object] = {
        "--checkpoint": args.checkpoint,
        "--device": args.device,
        "--output": output,
        "--num-envs": args.envs_per_gpu,  # per rank
        "--max-env-steps": args.episode_steps,
        "--n-steps": n_steps,
        "--total-steps": args.iterations * n_steps,
        "--n-epochs": args.n_epochs,
        "--batch-size": args.batch_per_gpu * gpus,
    }
    if args.memory_budget is not None:
        settings["--memory-budget"] = args.memory_budget
    command = [sys.executable, "train_grpo.py"]
    if way == "ranks":
        command.append("--data-parallel")
    for flag, value in settings.items():
        command += [flag, str(value)]
    return [*command, *FLAGS.split()]


def one_gpu_environ() -> dict[str, str]:
    """The environment variables of this process, but with only the first GPU visible."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": first}


def measure_rates(updates: list[MetricsRow]) -> Rates:
    """Medians of the rates of rollouts and of updates."""
    return Rates(
        env_steps_per_s=middle(updates, "rollout/env_steps_per_s"),
        samples_per_s=median(samples_learned(row) / row["time/update"] for row in updates),
    )


def samples_learned(row: MetricsRow) -> float:
    """How many decisions an update learned from; a decision counts once in every epoch."""
    decisions = row["rollout/env_steps_per_s"] * row["rollout/time_s"] / CHUNK_LENGTH
    return row["train/epochs"] * decisions * (1 - row.get("train/zero_advantage_fraction", 0.0))


def middle(updates: list[MetricsRow], name: str) -> float:
    """Median of a metric; an update without it counts as 0."""
    return median(row.get(name, 0.0) for row in updates)


def print_rates(rates: Rates, one_gpu_rates: Rates | None) -> None:
    """Print rates, and their ratios to those of one GPU if these are known."""
    for name, unit in (("env_steps_per_s", "env steps/s"), ("samples_per_s", "update samples/s")):
        rate = getattr(rates, name)
        ratio = ""
        if one_gpu_rates is not None:
            ratio = f", {rate / getattr(one_gpu_rates, name):.2f} x one GPU"
        print(f"    {rate:8.1f} {unit}{ratio}")


def print_times(updates: list[MetricsRow]) -> None:
    """Print the seconds of the parts of an iteration, and its peak memory."""
    print(
        f"    rollout {middle(updates, 'rollout/time_s'):.1f} s (policy {middle(updates, 'time/infer'):.1f}, waiting "
        f"{middle(updates, 'time/wait'):.1f}), update {middle(updates, 'time/update'):.1f} s, checkpoint "
        f"{middle(updates, 'time/checkpoint'):.1f} s, peak of tensors {middle(updates, 'system/gpu_mem_gb'):.1f} GiB, "
        f"first ratio error {middle(updates, 'train/first_ratio_error'):.4f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.data_parallel", main))
