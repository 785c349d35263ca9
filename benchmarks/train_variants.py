"""Train variants with the same seeds side by side, and play their start and every end on the same initial states.

    python -m benchmarks.train_variants OUT "base --preset tiny" "six-epochs --preset tiny --n-epochs 6" --seeds 0 1 2 3

A variant is a name and the flags of train_grpo.py. Ends are the checkpoints `latest`: `best` was chosen by what it is
measured on. They are played greedily and sampled at the temperature of training (--rules), on LIBERO's initial states
and then on fresh ones. OUT/NAME.json is what benchmarks.collect makes of a variant; benchmarks.compare
prints the tables. The same command goes on with what is missing: runs are resumed, and no episode is played twice.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks import collect
from command_line import main_guard, parse_flags
from configs.bounds import POSITIVE, check_fields
from contracts import BadInput
from envs.machine import usable_cores
from experiment.stored_run import StoredRun, read_run
from workshop.side_by_side import run_side_by_side


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
        check_fields(self)
        names = [variant.split()[0] for variant in self.variants if variant.split()]
        if len(set(names)) != len(self.variants) or any("/" in name for name in names):
            raise BadInput(f"variants {' '.join(names)}: each one needs a name of its own")


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.train_variants", description=__doc__)
    variants = {name: shlex.join(flags) for name, *flags in map(shlex.split, args.variants)}
    # The parent of each run's folder -> the run's flags.
    outputs = {
        args.out / name / str(seed): f"{flags} --seed {seed}"
        for seed in args.seeds
        for name, flags in variants.items()
    }
    trainings = {output / "output.log": training(output, flags) for output, flags in outputs.items()}
    try:
        run_side_by_side(trainings, args.at_once)
    except BadInput as failure:  # a variant may diverge; the others are played all the same
        print(failure, flush=True)
    runs = {output: stored for output in outputs if (stored := read_stored(output)) and stored.is_finished}
    play_starts_and_ends(args, runs)
    for name in variants:
        collect_variant(args, name, {output: runs[output] for output in runs if output.parent.name == name})


def play_starts_and_ends(args: Args, runs: Mapping[Path, StoredRun]) -> None:
    """Play the runs' last checkpoints, and those that they began from."""
    evaluations = {}
    for output, stored in runs.items():
        latest = stored.folder / "checkpoints" / "latest"
        evaluations[end_file(output)] = evaluation(args, stored, latest, end_file(output))
        start = stored.config.model.checkpoint
        evaluations[start_file(output)] = evaluation(args, stored, start, start_file(output))
    programs = {results.with_suffix(".log"): [program] for results, program in evaluations.items()}
    run_side_by_side(programs, args.at_once)


def collect_variant(args: Args, name: str, runs: Mapping[Path, StoredRun]) -> None:
    """Write the compact file of a variant, if it has a finished run."""
    if runs:
        folders = [stored.folder for stored in runs.values()]
        results = [start_file(next(iter(runs))), *map(end_file, runs)]
        words = [args.out / f"{name}.json", *folders, "--results", *results, "--note", args.note]
        collect.main([str(word) for word in words])


def read_stored(output: Path) -> StoredRun | None:
    """The run in a folder, as far as it has come; None before it began."""
    folders = [path.parent for path in sorted(output.glob("*/metrics.jsonl"))]
    return read_run(folders[-1]) if folders else None


def start_file(output: Path) -> Path:
    """The results of the checkpoint from which a run began: the same for all seeds of a variant."""
    return output.with_name("start.json")


def end_file(output: Path) -> Path:
    """The results of a run's end."""
    return output.with_name(f"end-{output.name}.json")


def training(output: Path, flags: str) -> list[str]:
    """The program that trains a run, or what it still lacks. Raises BadInput if its folder has another run."""
    command = f"train_grpo.py {flags} --output {shlex.quote(str(output))} --wandb-mode disabled"
    stored = read_stored(output)
    if stored is None:
        return [command]
    if stored.description["argv"] != shlex.split(command)[1:]:
        raise BadInput(f"{stored.folder} was trained by other flags: name another variant or another OUT")
    return [] if stored.is_finished else [f"train_grpo.py --resume {shlex.quote(str(stored.folder))}"]


def evaluation(args: Args, stored: StoredRun, checkpoint: object, results: Path) -> str:
    """The program that plays a checkpoint as the run does: its tasks, simulator, temperature and way to load it."""
    task = stored.config.task
    settings = vars(stored.config.model) | vars(stored.config.simulator)
    temperature = stored.config.rollout.temperature if "sample" in args.rules.split() else None
    changes = {"checkpoint": checkpoint, "num_envs": args.num_envs, "temperature": temperature}
    flags = [
        f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
        for name, value in (settings | changes).items()
        if value is not None
    ]
    tasks = f"--task-suite {task.task_suite} --task-ids {' '.join(map(str, task.task_ids))}"
    states = f"--init-states both --trials {args.states}"
    return f"eval.py {args.rules} {tasks} {states} {' '.join(flags)} --out {shlex.quote(str(results))}"


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.train_variants", main))
