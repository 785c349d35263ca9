"""Statistics and table of variants that were trained with the same seeds: what `benchmarks.compare` writes.

For each run, by the curve of `benchmarks.learning_report.learning_curve` (after each update, success of the last WINDOW
training episodes, or of all episodes of the update if it has more):
* area: mean height of this curve from 0 to the horizon, in env steps. Between two updates it is a straight line, before
  the first one a constant. Only of a run that has reached the horizon.
* env steps to 50 % and 75 %: those after the first update at which a whole window of episodes succeeded so often. A run
  that has not arrived after N env steps is censored: "> N".
* minutes: of rollouts and updates until the horizon, evaluations not counted.
* greedy: success of the last evaluation at or after the horizon.

Each variant is compared with the first one over the pairs of runs with equal seeds:
* Area, minutes, greedy: mean difference, its 95 % interval by the paired t distribution, and p of the exact two-sided
  sign-flip test: the share of the 2^n choices of signs with which the differences' sum lies as far from 0. With 4 pairs
  p is at least 0.125, with 10 at least 0.002.
* Env steps: ratio of the geometric means, interval and p the same way from the differences of logarithms. Nothing is
  imputed: a pair with a censored run is missing in ratio and interval, which describe only the complete pairs. p is
  then that of the exact sign test over all pairs of which it is known who arrived first: the complete ones, and those
  where one run arrived and the other had played as many env steps in vain.
* Holm's correction of each measure's p values over the variants.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from benchmarks.learning_report import (
    WINDOW,
    Point,
    evaluation_rows,
    first_reach,
    greedy_successes,
    learning_curve,
)
from contracts import BadInput, write_json
from experiment.run_files import CONFIG_FILE, METRICS_FILE, MetricsRow, read_metrics
from experiment.statistics import Paired

LEVELS = {"env steps to 50 %": 0.5, "env steps to 75 %": 0.75}  # measures that are compared by ratios
FORMATS = {"area": ".3f", **dict.fromkeys(LEVELS, ",.0f"), "minutes": ".1f", "greedy": ".3f"}


@dataclass(frozen=True)
class Value:
    """A run's value of one measure."""

    value: float | None  # None: the run was too short
    text: str
    censored_at: int | None = None  # env steps that were played without arriving

    def is_earlier(self, other: "Value") -> bool:
        """Whether it is known that this run arrived before the other."""
        if self.value is None:
            return False
        if other.value is None:
            return other.censored_at is not None and self.value <= other.censored_at
        return self.value < other.value


Summary: TypeAlias = dict[str, Value]  # a run's value of each measure


@dataclass(frozen=True)
class Comparison:
    """A variant against the first one in one measure."""

    variant: str
    measure: str
    estimate: float | None  # mean difference, or ratio of env steps; None without a complete pair
    interval: tuple[float, float] | None  # None for fewer than two complete pairs
    complete: int  # pairs that estimate and interval are of
    pairs: int
    test: str
    p: float
    p_holm: float = math.nan


def summarise(rows: Sequence[MetricsRow], horizon: int) -> Summary:
    """Measure a run by the rows of its metrics.jsonl."""
    points = learning_curve(rows)
    played = points[-1].env_steps if points else 0
    summary = dict.fromkeys(FORMATS, Value(None, "-"))
    summary["area"] = Value(None, f"- ({played:,} played)")
    for measure, level in LEVELS.items():
        point = first_reach(points, level)
        if point is None:
            summary[measure] = Value(None, f"> {played:,}", played)
        else:
            summary[measure] = Value(point.env_steps, f"{point.env_steps:,}")
    for point in points:
        if point.env_steps >= horizon:
            area = area_under_curve(points, horizon)
            summary["area"] = Value(area, f"{area:.3f}")
            summary["minutes"] = Value(point.minutes, f"{point.minutes:.1f}")
            break
    evaluations = [row for row in evaluation_rows(rows) if row["global_step"] >= horizon]
    if evaluations:
        successes = greedy_successes(evaluations[-1])
        summary["greedy"] = Value(successes.rate, f"{successes.k}/{successes.n}")
    return summary


def area_under_curve(points: Sequence[Point], horizon: int) -> float:
    """Mean training success from 0 to `horizon` env steps, which the run has reached."""
    env_steps = [0, *(point.env_steps for point in points)]
    success = [points[0].success, *(point.success for point in points)]
    corners = np.array([*(step for step in env_steps if step < horizon), horizon])
    heights = np.interp(corners, env_steps, success)
    return float(np.diff(corners) @ (heights[1:] + heights[:-1])) / 2 / horizon


def mean_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean by the t distribution; None for fewer than two differences."""
    n = len(differences)
    if n < 2:
        return None
    from scipy.stats import t as student_t  # takes a second

    half_width = student_t.ppf(0.975, n - 1) * np.std(differences, ddof=1) / math.sqrt(n)
    return float(np.mean(differences) - half_width), float(np.mean(differences) + half_width)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p value, if by chance each difference is as likely positive as negative; 1 without any."""
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    rounding = 1e-9 * math.fsum(map(abs, differences))  # equal sums may differ by so much
    return float(np.mean(np.abs(sums) >= abs(math.fsum(differences)) - rounding))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values (Holm, Scandinavian Journal of Statistics 6 (1979) 65-70)."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(factors * np.array(p_values)[order]))
    return adjusted.tolist()


def compare(variant: str, measure: str, pairs: Sequence[tuple[Value, Value]]) -> Comparison:
    """Compare the values of the first variant and of this one; a pair for each seed."""
    complete = [(a.value, b.value) for a, b in pairs if a.value is not None and b.value is not None]
    if measure in LEVELS:
        complete = [(math.log(a), math.log(b)) for a, b in complete]
    differences = [b - a for a, b in complete]
    estimate = float(np.mean(differences)) if differences else None
    interval = mean_interval(differences)
    if measure in LEVELS:
        estimate = None if estimate is None else math.exp(estimate)
        interval = None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
    test = "sign-flip"
    p = sign_flip_p(differences)
    if measure in LEVELS and len(complete) < len(pairs):
        earlier = sum(b.is_earlier(a) for a, b in pairs)
        later = sum(a.is_earlier(b) for a, b in pairs)
        test = f"sign: earlier in {earlier}, later in {later}"
        p = Paired(both=0, only_before=later, only_after=earlier, neither=0).p_value
    return Comparison(variant, measure, estimate, interval, len(complete), len(pairs), test, p)


def compare_with_first(variants: Mapping[str, Mapping[int, Summary]]) -> list[Comparison]:
    """Compare all variants with the first one in every measure. `variants`: name -> seed -> run."""
    names = list(variants)
    first = variants[names[0]]
    comparisons = []
    for measure in FORMATS:
        in_measure = []
        for name in names[1:]:
            seeds = sorted(first.keys() & variants[name].keys())
            pairs = [(first[seed][measure], variants[name][seed][measure]) for seed in seeds]
            in_measure.append(compare(name, measure, pairs))
        adjusted = holm([comparison.p for comparison in in_measure])
        comparisons += [replace(c, p_holm=p) for c, p in zip(in_measure, adjusted, strict=True)]
    return comparisons


# files


def newest_run(seed_folder: Path) -> Path | None:
    """The run folder in `seed_folder` that was begun last, by the time in its name; None if there is none."""
    return max((path.parent for path in seed_folder.glob(f"*/{CONFIG_FILE}")), default=None)


def read_variants(folder: Path, horizon: int) -> dict[str, dict[int, Summary]]:
    """Measure FOLDER/VARIANT/seed_S/RUN/metrics.jsonl or FOLDER/VARIANT/seed_S.jsonl. Returns name -> seed -> run."""
    variants: dict[str, dict[int, Summary]] = {}
    for path in sorted(folder.glob("*/seed_*")):
        metrics = path if path.suffix == ".jsonl" else (newest_run(path) or path) / METRICS_FILE
        if metrics.is_file():
            seed = int(path.stem.removeprefix("seed_"))
            variants.setdefault(path.parent.name, {})[seed] = summarise(read_metrics(metrics), horizon)
    return variants


def write_table(folder: Path, first: str | None, horizon: int) -> str:
    """Write table.md and table.json into `folder`; returns the Markdown. Raises BadInput.

    `first`: the variant with which the others are compared; None: the first of the alphabet.
    """
    variants = read_variants(folder, horizon)
    if not variants:
        raise BadInput(
            f"{folder} holds no run: expected VARIANT/seed_S/RUN/{METRICS_FILE} or VARIANT/seed_S.jsonl there"
        )
    first = first or next(iter(variants))
    if first not in variants:
        raise BadInput(f"--first {first}: {folder} holds no run of it, only of {', '.join(variants)}")
    variants = {first: variants.pop(first), **variants}
    comparisons = compare_with_first(variants)
    markdown = "\n".join([*rows_of_runs(variants, horizon), "", *rows_of_comparisons(comparisons, first)])
    (folder / "table.md").write_text(markdown + "\n")
    runs = {
        name: {seed: {measure: asdict(value) for measure, value in run.items()} for seed, run in runs.items()}
        for name, runs in variants.items()
    }
    results = {"horizon": horizon, "window": WINDOW, "runs": runs}
    write_json(folder / "table.json", {**results, "comparisons": [asdict(c) for c in comparisons]})
    return markdown


def rows_of_runs(variants: Mapping[str, Mapping[int, Summary]], horizon: int) -> list[str]:
    """A row for each run, and one of means for each variant. Means of env steps are geometric."""
    lines = [
        f"| to {horizon:,} env steps | seed | {' | '.join(FORMATS)} |",
        "|---" * (len(FORMATS) + 2) + "|",
    ]
    for name, runs in variants.items():
        for seed, run in sorted(runs.items()):
            lines.append(f"| {name} | {seed} | {' | '.join(value.text for value in run.values())} |")
        means = [describe_mean(measure, [run[measure].value for run in runs.values()]) for measure in FORMATS]
        lines.append(f"| **{name}** | mean | {' | '.join(means)} |")
    return lines


def describe_mean(measure: str, values: Sequence[float | None]) -> str:
    """The mean, or of how many runs the value is known if not of all."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"{len(known)} of {len(values)} runs"
    mean = math.exp(np.mean(np.log(known))) if measure in LEVELS else np.mean(known)
    return format(mean, FORMATS[measure])


def rows_of_comparisons(comparisons: Sequence[Comparison], first: str) -> list[str]:
    """A row for each variant and measure."""
    lines = [
        f"| against {first} | measure | difference or ratio [95 %] | complete pairs | test | p | p by Holm |"
    ]
    lines.append("|---" * 7 + "|")
    for c in comparisons:
        spec = ".2f" if c.measure in LEVELS else "+.3f"
        estimate = "-" if c.estimate is None else format(c.estimate, spec)
        if c.interval is not None:
            estimate += f" [{format(c.interval[0], spec)}, {format(c.interval[1], spec)}]"
        pairs = f"{c.complete} of {c.pairs}"
        lines.append(
            f"| {c.variant} | {c.measure} | {estimate} | {pairs} | {c.test} | {c.p:.2g} | {c.p_holm:.2g} |"
        )
    return lines
