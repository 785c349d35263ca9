"""Compare several runs in a table and a picture: python -m benchmarks.learning_report FOLDER [--picture FILE]

FOLDER/VARIANT/seed_S.jsonl is the metrics.jsonl of one run. The table has a row for each variant, which shows
* greedy success before and after training, over all seeds, with Wilson intervals;
* after how many env steps, and minutes of rollouts and updates, the success of the last WINDOW training episodes first
  reached each of LEVELS (never before WINDOW episodes were played);
* the success of the training episodes between two numbers of env steps (--between), of all seeds together and of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiment.run_files import MetricsRow, read_metrics
from experiment.statistics import Successes
from experiment.stored_run import GREEDY, TEACHER

if TYPE_CHECKING:  # imported where it is used: --help needs no matplotlib
    from matplotlib.axes import Axes

ROLLOUT = "rollout/success_rate"
WINDOW = 50  # training episodes over which success is averaged
LEVELS = (0.5, 0.75, 0.9)  # success rates


@dataclass(frozen=True)
class Point:
    """Where a run stood after an update."""

    env_steps: int
    minutes: float  # of rollouts and updates
    episodes: int  # those that `success` is of: the last WINDOW, or all so far if those are fewer
    success: float


@dataclass(frozen=True)
class Variant:
    """The runs of one folder."""

    name: str
    seeds: list[list[MetricsRow]]  # for every seed the rows of its metrics.jsonl

    def evaluations(self) -> list[list[MetricsRow]]:
        """The rows of the evaluations, for every seed that was evaluated before and after training."""
        by_seed = [evaluation_rows(rows) for rows in self.seeds]
        return [rows for rows in by_seed if len(rows) > 1]

    def training_success(self, first: int, last: int) -> str:
        """Success of the training episodes of all updates that ended between `first` and `last` env steps."""
        by_seed = []
        for rows in self.seeds:
            counted = [row for row in rows if ROLLOUT in row and first < row["global_step"] <= last]
            by_seed.append(pool(rollout_successes(row) for row in counted))
        percentages = ", ".join(f"{100 * successes.rate:.0f}" for successes in by_seed)
        return f"{pool(by_seed)} ({percentages})"


def evaluation_rows(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    return [row for row in rows if GREEDY in row]


def pool(parts: Iterable[Successes]) -> Successes:
    parts = list(parts)
    return Successes(sum(part.k for part in parts), sum(part.n for part in parts))


def pooled_greedy(rows: Sequence[MetricsRow]) -> str:
    """Greedy success of several evaluations together, with its interval; "-" if there are none."""
    if not rows:
        return "-"
    return str(pool(greedy_successes(row) for row in rows))


def greedy_successes(row: MetricsRow) -> Successes:
    """How many greedy episodes of an evaluation succeeded."""
    return Successes(int(row[f"{GREEDY}_k"]), int(row[f"{GREEDY}_n"]))


def rollout_successes(row: MetricsRow) -> Successes:
    """How many training episodes of an update succeeded."""
    n = int(row["rollout/trajectories"])
    return Successes(round(row[ROLLOUT] * n), n)


def learning_curve(rows: Sequence[MetricsRow]) -> list[Point]:
    """The points of a run, one for each update."""
    points = []
    updates: list[Successes] = []
    seconds = 0.0
    for row in rows:
        if ROLLOUT not in row:
            continue
        updates.append(rollout_successes(row))
        seconds += row["rollout/time_s"] + row.get("time/update", 0.0)
        episodes, success = trailing_success(updates)
        points.append(Point(int(row["global_step"]), seconds / 60, episodes, success))
    return points


def trailing_success(updates: Sequence[Successes]) -> tuple[int, float]:
    """Number and success of the last WINDOW episodes, or of all episodes of the last update if it has more.

    The order of episodes within an update is not known. So if the window cuts an update, each of the episodes that lie
    in the window counts as the update's success rate.
    """
    window = max(WINDOW, updates[-1].n)
    episodes = 0
    successes = 0.0
    for update in reversed(updates):
        inside = min(update.n, window - episodes)
        episodes += inside
        successes += inside * update.rate
        if episodes == window:
            break
    return episodes, successes / episodes


def first_reach(points: Sequence[Point], level: float) -> Point | None:
    """The first point at which the success of a whole window was at least `level`."""
    for point in points:
        if point.episodes >= WINDOW and point.success >= level - 1e-9:  # rounding: 37.5 of 50 are 75 %
            return point
    return None


def describe_first_reach(points: Sequence[Point], level: float) -> str:
    """After how many thousand env steps and minutes the level was first reached; "-" if it was not."""
    point = first_reach(points, level)
    return "-" if point is None else f"{point.env_steps / 1000:.0f}k ({point.minutes:.0f} min)"


def read_variants(folder: Path) -> list[Variant]:
    variants = []
    for variant_folder in sorted(folder.iterdir()):
        files = sorted(variant_folder.glob("seed_*.jsonl"))
        if files:
            variants.append(Variant(variant_folder.name, [read_metrics(file) for file in files]))
    return variants


def table(variants: Sequence[Variant], first: int, last: int) -> str:
    """A Markdown table; `first` and `last` are the env steps of --between."""
    heads = ["variant", "greedy before", "greedy after", "above the teacher, points", "env steps"]
    heads += [f"rollouts at {100 * level:.0f} %" for level in LEVELS]
    heads.append(f"training episodes from {first:,} to {last:,} env steps")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for variant in variants:
        curves = [learning_curve(rows) for rows in variant.seeds]
        evaluations = variant.evaluations()
        gains = [100 * (rows[-1][GREEDY] - rows[-1][TEACHER]) for rows in evaluations]
        cells = [
            variant.name,
            pooled_greedy([rows[0] for rows in evaluations]),
            pooled_greedy([rows[-1] for rows in evaluations]),
            ", ".join(f"{round(gain):+d}" for gain in gains),
            ", ".join(f"{points[-1].env_steps:,}" for points in curves),
        ]
        for level in LEVELS:
            cells.append(", ".join(describe_first_reach(points, level) for points in curves))
        cells.append(variant.training_success(first, last))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(variants: Sequence[Variant], path: Path) -> None:
    """Write a PNG: training success as lines, greedy success on held-out states as circles, the teacher's dashed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, variant in enumerate(variants):
        for seed, rows in enumerate(variant.seeds):
            draw_run(axes, rows, color=f"C{i % 10}", label=variant.name if seed == 0 else None)
    axes.set(xlabel="env steps", ylabel="success rate", ylim=(-0.03, 1.03))
    axes.set_title(
        "lines: training episodes; circles: greedy, held-out states; dashed: the teacher", fontsize=9
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_run(axes: Axes, rows: Sequence[MetricsRow], color: str, label: str | None) -> None:
    points = learning_curve(rows)
    axes.plot(
        [point.env_steps for point in points],
        [point.success for point in points],
        color=color,
        label=label,
    )
    evaluations = evaluation_rows(rows)
    axes.plot(
        [row["global_step"] for row in evaluations],
        [row[GREEDY] for row in evaluations],
        "o",
        color=color,
    )
    if evaluations:
        axes.axhline(evaluations[0][TEACHER], color="#999999", linestyle="--", linewidth=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning_report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="folder of variants")
    parser.add_argument("--picture", type=Path, help="PNG to write (default: FOLDER/learning.png)")
    parser.add_argument("--between", type=int, nargs=2, default=(0, 10**9), help="env steps")
    arguments = parser.parse_args()
    variants = read_variants(arguments.folder)
    first, last = arguments.between
    print(table(variants, first, last))
    draw(variants, arguments.picture or arguments.folder / "learning.png")


if __name__ == "__main__":
    main()
