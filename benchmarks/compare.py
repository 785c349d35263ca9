"""Print how variants differ that were trained with the same seeds, as a Markdown table.

    python -m benchmarks.compare base.json other.json third.json [--horizon 100000]

The files are those of benchmarks.collect, the first one is the base. Runs of equal seeds are pairs:

* area: mean success of training episodes from 0 to the horizon (the shortest run's end, if it is not given);
* minutes: of rollouts and updates until the horizon;
* sampled, greedy: success of the last evaluation.

"by state": pairs are initial states, with the mean success over the seeds. They are those of the results files of
eval.py, if the files have any, else of the last evaluations. Each row has the mean difference, its 95 % interval and p
by the paired t test, and Holm's correction of p over the variants. Runs are comparable in env steps only with equal
--num-envs, and in minutes only if the machine is equally busy. Several runs at once are a line of shell:

    for S in 0 1 2 3; do python train_grpo.py --preset tiny --seed $S --output runs/base & done; wait
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from scipy.stats import ttest_rel

from benchmarks.collect import share
from benchmarks.table import by_state
from command_line import main_guard, parse_flags
from contracts import BadInput

MEASURES = ("area", "minutes", "sampled", "greedy")


@dataclass(frozen=True)
class Args:
    # Files of benchmarks.collect; the first one is the base.
    files: tyro.conf.Positional[tuple[Path, ...]]
    # Env steps until which area and minutes are measured (None: the end of the shortest run).
    horizon: int | None = None


@dataclass(frozen=True)
class Row:
    """One variant against the base in one measure."""

    measure: str
    variant: str
    pairs: int
    base_mean: float
    mean: float
    low: float  # of the difference's 95 % interval
    high: float
    p: float


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.compare", description=__doc__)
    experiments = {path.stem: json.loads(path.read_text()) for path in args.files}
    ends = [run["updates"]["global_step"][-1] for each in experiments.values() for run in each["runs"]]
    horizon = min(ends) if args.horizon is None else args.horizon
    if horizon > min(ends):
        raise BadInput(f"--horizon {horizon}: the shortest run ends at {min(ends)}")
    print(
        f"| to {horizon:,} env steps | variant | pairs | base | variant | difference [95 %] | p | by Holm |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for measure, rows in compare(experiments, horizon).items():
        for row, corrected in zip(rows, holm([row.p for row in rows]), strict=True):
            difference = f"{row.mean - row.base_mean:+.3f} [{row.low:+.3f}, {row.high:+.3f}]"
            print(
                f"| {measure} | {row.variant} | {row.pairs} | {row.base_mean:.3f} | {row.mean:.3f} | {difference} "
                f"| {row.p:.2g} | {corrected:.2g} |"
            )


def compare(experiments: Mapping[str, dict], horizon: int) -> dict[str, list[Row]]:
    """Compare each experiment with the first one: measure -> a row for each variant that can be compared."""
    values = {
        name: values_by_seed(each, horizon) | values_by_state(each) for name, each in experiments.items()
    }
    base, *variants = values
    table = {}
    for measure in values[base]:
        rows = [
            paired(measure, name, values[base][measure], values[name].get(measure, {})) for name in variants
        ]
        table[measure] = [row for row in rows if row is not None]
    return table


def values_by_seed(experiment: dict, horizon: int) -> dict[str, dict[object, float]]:
    """Measure -> seed -> the run's value."""
    runs = {run["seed"]: measure_run(run, horizon) for run in experiment["runs"]}
    return {measure: {seed: run[measure] for seed, run in runs.items()} for measure in MEASURES}


def measure_run(run: dict, horizon: int) -> dict[str, float]:
    updates = run["updates"]
    env_steps = np.array(updates["global_step"])
    places = np.linspace(0, horizon, 1001)
    seconds = np.array(updates["rollout/time_s"]) + np.array(updates["time/update"], dtype=float)
    last = run["evaluations"][-1]["successes"]
    return {
        "area": float(np.interp(places, env_steps, updates["rollout/success_rate"]).mean()),
        "minutes": float(np.nansum(seconds[env_steps <= horizon])) / 60,
        "sampled": share(last["sample"]),
        "greedy": share(last["greedy"]),
    }


def values_by_state(experiment: dict) -> dict[str, dict[object, float]]:
    """`MODE by state` -> (task, place of the state) -> mean success over the seeds."""
    played = [results["successes"] for results in experiment["results"] if results["seed"] is not None]
    if not played:
        played = [run["evaluations"][-1]["successes"] for run in experiment["runs"]]
    values = {}
    for mode in ("sample", "greedy"):
        outcomes = [by_state(successes[mode]) for successes in played]
        states = {state: np.mean([each[state] for each in outcomes]) for state in outcomes[0]}
        values[f"{mode} by state"] = states
    return values


def paired(
    measure: str, variant: str, base: Mapping[object, float], other: Mapping[object, float]
) -> Row | None:
    """Compare over the seeds or states that both have; None if there are fewer than two."""
    shared = [key for key in base if key in other]
    if len(shared) < 2:
        return None
    before = np.array([base[key] for key in shared])
    after = np.array([other[key] for key in shared])
    test = ttest_rel(after, before)
    interval = test.confidence_interval(0.95)
    return Row(
        measure, variant, len(shared), before.mean(), after.mean(), interval.low, interval.high, test.pvalue
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values (Holm, Scandinavian Journal of Statistics 6 (1979) 65-70)."""
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(factors * np.array(p_values)[order]))
    return adjusted.tolist()


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.compare", main))
