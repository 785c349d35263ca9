"""Train variants with the same seeds side by side, and play their start and every end on the same initial states.

    python -m benchmarks.seeds OUT "base --preset tiny" "six-epochs --preset tiny --n-epochs 6" --seeds 0 1 2 3

A variant is a name and the flags of train_grpo.py. Ends are the checkpoints `latest`: `best` was chosen by what it is
measured on. They are played greedily and sampled at the temperature of training (--rules), on LIBERO's initial states
and then on fresh ones. OUT/NAME.json is what benchmarks.collect makes of a variant; benchmarks.compare
prints the tables. The same command goes on with what is missing: runs are resumed, and no episode is played twice.
"""

import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from benchmarks import collect
from command_line import main_guard, parse_flags
from configs.bounds import POSITIVE, check_numbers
from contracts import BadInput
from envs.machine import usable_cores
from experiment.run_folder import StoredRun, read_run
from workshop.side_by_side import run


@dataclass(frozen=True)
class Args:
    # Folder of all runs and results.
    out: tyro.conf.Positional[Path]
    # Variants, each in quotes: a name, then flags of train_grpo.py.
    variants: tyro.conf.Positional[tuple[str, ...]]
    # Seeds that every variant is trained with.
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    # Initial states of every task, of which the first 50 are LIBERO's own.
    states: Annotated[int, POSITIVE] = 200
    # Flags of eval.py that say how starts and ends act.
    rules: str = "--mode greedy sample"
    # Simulators of an evaluation.
    num_envs: Annotated[int, POSITIVE] = 3
    # Runs at the same time.
    at_once: Annotated[int, POSITIVE] = max(1, usable_cores() // 3)
    # What a reader of the results should know.
    note: str = ""

    def __post_init__(self) -> None:
        check_numbers(self)
        names = [variant.split()[0] for variant in self.variants if variant.split()]
        if len(set(names)) != len(self.variants) or any("/" in name for name in names):
            raise BadInput(f"variants {' '.join(names)}: each one needs a name of its own")


@dataclass(frozen=True)
class SeedRun:
    """One seed of one variant."""

    name: str
    flags: str
    seed: int
    folder: Path  # the parent of its run folder

    def stored(self) -> StoredRun | None:
        """Its run as far as it has come; None before it began."""
        folders = [path.parent for path in sorted(self.folder.glob("*/metrics.jsonl"))]
        return read_run(folders[-1]) if folders else None


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.seeds", description=__doc__)
    runs = [
        SeedRun(name, shlex.join(flags), seed, args.out / name / str(seed))
        for seed in args.seeds
        for name, *flags in map(shlex.split, args.variants)
    ]
    with ThreadPoolExecutor(args.at_once) as threads:
        list(threads.map(train_and_play, [args] * len(runs), runs, range(len(runs))))
    for name in dict.fromkeys(one.name for one in runs):
        collect_variant(args, name, [one for one in runs if one.name == name])


def train_and_play(args: Args, one: SeedRun, index: int) -> None:
    """Train a run to its end, and play it. The first seed of each variant also plays the start."""
    gpu = index % max(1, torch.cuda.device_count())
    log = one.folder / "output.log"
    stored = one.stored()
    if stored is None:
        train = f"{one.flags} --seed {one.seed} --output {one.folder} --wandb-mode disabled"
        run(log, [f"train_grpo.py {train}"], gpu)
    elif not stored.is_finished:
        run(log, [f"train_grpo.py --resume {stored.folder}"], gpu)
    finished = one.stored()
    assert finished is not None
    checkpoints = {results_file(args, one): str(finished.folder / "checkpoints" / "latest")}
    if one.seed == args.seeds[0]:
        checkpoints[start_file(args, one.name)] = str(finished.config.model.checkpoint)
    played = [evaluation(args, finished, checkpoint, results) for results, checkpoint in checkpoints.items()]
    run(log, played, gpu)


def evaluation(args: Args, stored: StoredRun, checkpoint: str, results: Path) -> str:
    """The program that plays a checkpoint on the tasks of a run, with its looks and its temperature."""
    config = stored.config
    return (
        f"eval.py --checkpoint {checkpoint} {args.rules} --temperature {config.rollout.temperature} "
        f"--task-suite {config.task.task_suite} --task-ids {' '.join(map(str, config.task.task_ids))} "
        f"--init-states both --trials {args.states} --num-envs {args.num_envs} --device {config.model.device} "
        f"--assets {config.simulator.assets} --out {results}"
    )


def results_file(args: Args, one: SeedRun) -> Path:
    return args.out / one.name / f"end-{one.seed}.json"


def start_file(args: Args, name: str) -> Path:
    return args.out / name / "start.json"


def collect_variant(args: Args, name: str, runs: Sequence[SeedRun]) -> None:
    """Write the compact file of a variant."""
    folders = [str(stored.folder) for one in runs if (stored := one.stored()) is not None]
    results = [start_file(args, name), *(results_file(args, one) for one in runs)]
    collect.main(
        [str(args.out / f"{name}.json"), *folders, "--results", *map(str, results), "--note", args.note]
    )


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.seeds", main))
