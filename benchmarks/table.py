"""Print the start and the end of every run of an experiment as a Markdown table: sampled and greedy, state by state.

    python -m benchmarks.table docs/results/NAME.json

The file is one of benchmarks.collect. If it has results files of eval.py of a start, which belongs to no run, and of a
run's end, these are compared; else the run's first and last evaluations. Each change has its 95 % interval in
points and p of McNemar's test. Minutes are of rollouts and updates.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from command_line import main_guard, parse_flags
from experiment.statistics import compare

HEAD = "| seed | sampled, start → end | change | greedy, start → end | change | minutes |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Args:
    # File of benchmarks.collect.
    experiment: tyro.conf.Positional[Path]


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.table", description=__doc__)
    experiment = json.loads(args.experiment.read_text())
    ends = {results["seed"]: results["successes"] for results in experiment["results"]}
    print(HEAD)
    for run in experiment["runs"]:
        if None in ends and run["seed"] in ends:
            start = ends[None]
            end = ends[run["seed"]]
        else:
            start = run["evaluations"][0]["successes"]
            end = run["evaluations"][-1]["successes"]
        cells = [cell for mode in ("sample", "greedy") for cell in change(start[mode], end[mode])]
        updates = run["updates"]
        minutes = sum(updates["rollout/time_s"] + [value or 0 for value in updates["time/update"]]) / 60
        print(f"| {run['seed']} | {' | '.join(cells)} | {minutes:.1f} |")


def change(start: Mapping[str, str], end: Mapping[str, str]) -> tuple[str, str]:
    """The two numbers of successes, and how sure their difference is, over the states that both have played."""
    pair = compare(by_state(start), by_state(end))
    return f"{pair.before.k} → {pair.after.k} of {pair.n}", str(pair)


def by_state(tasks: Mapping[str, str]) -> dict[tuple[str, int], bool]:
    """(task and first state, place) -> success."""
    return {
        (task, place): outcome == "1"
        for task, string in tasks.items()
        for place, outcome in enumerate(string)
    }


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.table", main))
