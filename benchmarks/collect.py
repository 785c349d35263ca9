"""Write one compact file of an experiment from its run folders and results files, and print its size.

    python -m benchmarks.collect docs/results/NAME.json RUN ... [--results FILE ...] [--note TEXT]

RUN: folders of train_grpo.py, one for each seed. FILE: results files of eval.py (`--mode greedy sample`), one for each
checkpoint, of these runs or of their start. docs/results/README.md explains the fields. benchmarks.plot and
benchmarks.compare read the file.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from typing_extensions import TypedDict  # pydantic cannot read typing's in Python 3.10

from command_line import main_guard, parse_flags
from contracts import BadInput, read_fields
from experiment.episodes import EpisodeResult
from experiment.provenance import Provenance
from experiment.results import read_results
from experiment.stored_run import read_run
from experiment.verdict import read_evaluations

Successes = dict[str, dict[str, str]]  # see `successes_by_player`
# What benchmarks.plot and benchmarks.compare need of the updates: metric -> its value in each of them.
Updates = TypedDict(
    "Updates",
    {
        "global_step": list[int],
        "rollout/success_rate": list[float],
        "rollout/trajectories": list[int],
        "rollout/teacher_fraction": list[float],
        "rollout/time_s": list[float],
        "time/update": list[float | None],
    },
)


class CollectedEvaluation(TypedDict):
    global_step: int
    successes: Successes


class CollectedRun(TypedDict):
    seed: int
    world: str
    updates: Updates
    evaluations: list[CollectedEvaluation]


class CollectedResults(TypedDict):
    seed: int | None
    world: str
    successes: Successes


class Experiment(TypedDict):
    """What benchmarks.compare and benchmarks.plot read of the file."""

    runs: list[CollectedRun]
    results: list[CollectedResults]


@dataclass(frozen=True)
class Args:
    # File to write.
    out: tyro.conf.Positional[Path]
    # Run folders.
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    # Results files of eval.py.
    results: tuple[Path, ...] = ()
    # What a reader should know: the machine beside it, what was planned, what went wrong.
    note: str = ""


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.collect", description=__doc__)
    runs = [collect_run(folder) for folder in args.runs]
    results = [collect_results(path, args.runs) for path in args.results]
    for parts in (runs, results):
        refuse_repeated_seeds([part["seed"] for part in parts])
    experiment = {"note": args.note, "runs": runs, "results": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(experiment, separators=(",", ":")) + "\n")
    print(f"wrote {args.out}, {args.out.stat().st_size / 1e3:.1f} kB")


def refuse_repeated_seeds(seeds: Sequence[object]) -> None:
    """Raise BadInput if a seed occurs twice: benchmarks.compare pairs runs and results by their seeds."""
    for seed in set(seeds):
        if seeds.count(seed) > 1:
            problem = (
                f"two are of seed {seed}" if seed is not None else "two results belong to none of the runs"
            )
            raise BadInput(
                f"{problem}: an experiment has one run of a seed, results of its end, and of one start"
            )


def collect_run(folder: Path) -> dict[str, object]:
    """The command, commit and machine of a run, its updates as columns, and its evaluations. Raises BadInput."""
    run = read_run(folder)
    updates = [row for row in run.rows if "rollout/success_rate" in row]
    fields = [name for name in Updates.__annotations__ if any(name in row for row in updates)]
    return {
        "seed": run.config.run.seed,
        "argv": run.description["argv"],
        "commit": run.description["git"].get("commit"),
        "machine": run.description["machine"],
        "world": f"{run.description['simulator']}, assets {run.description['looks']}",
        "updates": {name: [rounded(row.get(name)) for row in updates] for name in fields},
        "evaluations": [
            {"global_step": each.env_steps, "successes": successes_by_player(each.episodes)}
            for each in read_evaluations(run)
        ],
    }


def collect_results(path: Path, runs: Sequence[Path]) -> dict[str, object]:
    """How a checkpoint was played, and the success of every episode. `seed`: that of its run; None for another."""
    results = read_results(path)
    provenance = read_fields(path, Provenance, part="provenance")
    checkpoint = results.settings.checkpoint
    its_runs = [run for run in runs if run.resolve() in Path(checkpoint).resolve().parents]
    seeds = [read_run(run).config.run.seed for run in its_runs]
    return {
        "checkpoint": checkpoint,
        "seed": seeds[0] if seeds else None,
        "argv": provenance["argv"],
        "commit": provenance["git"].get("commit"),
        "machine": provenance["machine"],
        "world": f"{results.settings.simulator}, assets {results.settings.assets}",
        "successes": successes_by_player(results.episodes),
    }


def successes_by_player(episodes: Sequence[EpisodeResult]) -> dict[str, dict[str, str]]:
    """Player (teacher, or the mode of a student) -> task and first state -> a string of 0 and 1, a place a state."""
    outcomes: dict[str, dict[str, dict]] = defaultdict(lambda: defaultdict(dict))
    for result in episodes:
        player: str = "teacher" if result.actor == "teacher" else result.mode
        task = f"{result.task_suite} {result.task_id} {'fresh' if result.fresh else 'official'}"
        place = (result.init_state_id, result.repeat)
        if place in outcomes[player][task]:
            raise BadInput(
                f"{task}: {player} was played at two temperatures, which have no places of their own"
            )
        outcomes[player][task][place] = result.success
    successes: dict[str, dict[str, str]] = defaultdict(dict)
    for player, tasks in outcomes.items():
        for task, states in tasks.items():
            first_state, _ = min(states)
            last_state, last_repeat = max(states)
            if len(states) != (last_state - first_state + 1) * (last_repeat + 1):
                raise BadInput(f"{task}: {player} did not play all states, so places would not be states")
            string = "".join(str(int(states[state])) for state in sorted(states))
            successes[player][f"{task} from {first_state}"] = string
    return successes


def read_experiment(path: Path) -> Experiment:
    """Read a file that this program wrote. Raises BadInput."""
    return read_fields(path, Experiment, "write it again by benchmarks.collect")


def tasks_of(successes: Successes, player: str) -> Mapping[str, str]:
    """The successes of one player. Raises BadInput if it did not play."""
    if player not in successes:
        raise BadInput(f"a checkpoint was played by {', '.join(successes)} alone, {player} is missing, too")
    return successes[player]


def share(tasks: Mapping[str, str]) -> float:
    """Share of the episodes of all tasks that succeeded."""
    outcomes = "".join(tasks.values())
    return outcomes.count("1") / len(outcomes)


def rounded(value: float | None) -> float | None:
    """Four digits are enough for a plot. Numbers of env steps stay whole."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.collect", main))
