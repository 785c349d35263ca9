"""Print Markdown tables of experiments: how the runs of one file began and ended, or how variants differ.

    python -m benchmarks.compare docs/results/NAME.json
    python -m benchmarks.compare base.json other.json third.json

The files are those of benchmarks.collect.

One file: sampled and greedy success of every run, state by state, with the 95 % interval of the change in points, p of
McNemar's test, and minutes of rollouts and updates. If the file has results of eval.py of a start, which belongs to no
run, and of a run's end, these are compared; else the run's first and last evaluations.

Several files: how the variants, trained with the same seeds, differ from the first file. Runs of equal seeds are pairs;
those of a seed that a file lacks are left out:

* area: mean success of training episodes from 0 to the end of the shortest run, in env steps;
* minutes: of rollouts and updates until there;
* sampled, greedy: success at the ends, as eval.py played them; if a file has no results of it, in the last evaluations.

"by state": pairs are initial states, with the mean success over the seeds. Each row has the mean difference, its 95 %
interval and p by the paired t test. The more variants there are, the more of them differ by chance: p is not corrected
for that. Runs are comparable in env steps only with equal --num-envs, and in minutes only if the machine is equally
busy.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from scipy.stats import ttest_rel

from benchmarks.collect import Experiment, Updates, read_experiment, share, tasks_of
from command_line import main_guard, parse_flags
from contracts import BadInput
from experiment.statistics import compare

MODES = {"sample": "sampled", "greedy": "greedy"}  # of eval.py -> its name in tables
START_AND_END = """\
| seed | sampled, start → end | change | greedy, start → end | change | minutes |
|---|---|---|---|---|---|"""
DIFFERENCES = """\
| to {horizon:,} env steps | variant | pairs | base | variant | difference [95 %] | p |
|---|---|---|---|---|---|---|"""

Values = Mapping[object, float]  # seed or state -> success, area or minutes


@dataclass(frozen=True)
class Args:
    # Files of benchmarks.collect; the first one is the base.
    files: tyro.conf.Positional[tuple[Path, ...]]


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.compare", description=__doc__)
    experiments = [read_experiment(path) for path in args.files]
    worlds = {part["world"] for each in experiments for part in (*each["runs"], *each["results"])}
    if len(worlds) > 1:
        raise BadInput(f"the successes are of several simulators or assets: {'; '.join(sorted(worlds))}")
    if len(experiments) == 1:
        print_start_and_end(experiments[0])
    else:
        stems = [path.stem for path in args.files[1:]]
        has_duplicates = len(set(stems)) < len(stems)
        print_differences([str(path) for path in args.files[1:]] if has_duplicates else stems, experiments)


def print_start_and_end(experiment: Experiment) -> None:
    print(START_AND_END)
    ends = {results["seed"]: results["successes"] for results in experiment["results"]}
    for run in experiment["runs"]:
        start = run["evaluations"][0]["successes"]
        end = run["evaluations"][-1]["successes"]
        if None in ends and run["seed"] in ends:
            start = ends[None]
            end = ends[run["seed"]]
        cells = []
        for mode in MODES:
            pair = compare(by_state(tasks_of(start, mode)), by_state(tasks_of(end, mode)))
            cells += [f"{pair.before.k} → {pair.after.k} of {pair.n}", str(pair)]
        print(f"| {run['seed']} | {' | '.join(cells)} | {minutes(run['updates']):.1f} |")


def print_differences(names: Sequence[str], experiments: Sequence[Experiment]) -> None:
    """Compare the variants with these names, all experiments but the first, with the first.

    Raises BadInput if they share fewer than two seeds.
    """
    seeds = set.intersection(*({run["seed"] for run in each["runs"]} for each in experiments))
    if len(seeds) < 2:
        raise BadInput(f"the files share the seeds {sorted(seeds)}: pairs need at least two")
    runs = [run for each in experiments for run in each["runs"] if run["seed"] in seeds]
    horizon = min(run["updates"]["global_step"][-1] for run in runs)
    print(DIFFERENCES.format(horizon=horizon))
    base, *variants = [measure(each, horizon, seeds) for each in experiments]
    for name_of_measure, values in base.items():
        columns = [variant[name_of_measure] for variant in variants]
        print_rows(name_of_measure, values, dict(zip(names, columns, strict=True)))


def print_rows(measure: str, base: Values, variants: Mapping[str, Values]) -> None:
    """A row for each variant that shares at least two seeds or states with the base."""
    for name, values in variants.items():
        shared = [key for key in base if key in values]
        if len(shared) < 2:
            continue
        before = np.array([base[key] for key in shared])
        after = np.array([values[key] for key in shared])
        test = ttest_rel(after, before)
        low, high = test.confidence_interval(0.95)
        is_same = np.array_equal(before, after)  # then t is 0 / 0
        difference = f"{(after - before).mean():+.3f} [{low:+.3f}, {high:+.3f}]"
        p = 1.0 if is_same else test.pvalue
        means = f"{before.mean():.3f} | {after.mean():.3f}"
        print(f"| {measure} | {name} | {len(shared)} | {means} | {difference} | {p:.2g} |")


def measure(experiment: Experiment, horizon: int, seeds: Collection[int]) -> dict[str, Values]:
    """Measure -> seed or state -> value, of the runs with these seeds."""
    runs = {run["seed"]: run for run in experiment["runs"] if run["seed"] in seeds}
    updates = {seed: run["updates"] for seed, run in runs.items()}
    values: dict[str, Values] = {
        "area": {seed: area(columns, horizon) for seed, columns in updates.items()},
        "minutes": {seed: minutes(columns, horizon) for seed, columns in updates.items()},
    }
    ends = {one["seed"]: one["successes"] for one in experiment["results"] if one["seed"] in seeds}
    if not ends:
        ends = {seed: run["evaluations"][-1]["successes"] for seed, run in runs.items()}
    for mode, name in MODES.items():
        values[name] = {seed: share(tasks_of(successes, mode)) for seed, successes in ends.items()}
        outcomes = [by_state(tasks_of(successes, mode)) for successes in ends.values()]
        values[f"{name} by state"] = {
            state: float(np.mean([each[state] for each in outcomes])) for state in outcomes[0]
        }
    return values


def area(updates: Updates, horizon: int) -> float:
    """Mean success of training episodes from 0 to `horizon` env steps."""
    ends = np.minimum(updates["global_step"], horizon)
    lengths = np.diff(ends, prepend=0)  # of the rollouts, in env steps
    return float(np.average(updates["rollout/success_rate"], weights=lengths))


def minutes(updates: Updates, horizon: float = np.inf) -> float:
    """Of rollouts and updates until `horizon` env steps, the last update in proportion."""
    seconds = np.array([updates["rollout/time_s"], updates["time/update"]], dtype=float)
    passed = np.nansum(seconds, axis=0).cumsum()
    return float(np.interp(horizon, [0, *updates["global_step"]], [0, *passed])) / 60


def by_state(tasks: Mapping[str, str]) -> dict[tuple[str, int], bool]:
    """(task and first state, place) -> success."""
    return {
        (task, place): outcome == "1"
        for task, string in tasks.items()
        for place, outcome in enumerate(string)
    }


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.compare", main))
