"""Draw the learning curves of several runs: python -m benchmarks.learning_report FOLDER [--picture FILE]

FOLDER/VARIANT/seed_S.jsonl is the metrics.jsonl of one run. Lines: success of the last WINDOW training episodes;
circles: of greedy evaluations; dashes: of the teacher. `benchmarks.compare FOLDER` writes the table of the same files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import main_guard
from contracts import BadInput
from experiment.run_files import MetricsRow, read_metrics
from experiment.statistics import Successes
from experiment.stored_run import GREEDY, TEACHER

if TYPE_CHECKING:  # imported where it is used: --help needs no matplotlib
    from matplotlib.axes import Axes

ROLLOUT = "rollout/success_rate"
WINDOW = 50  # training episodes over which success is averaged


@dataclass(frozen=True)
class Point:
    """Where a run stood after an update."""

    env_steps: int
    minutes: float  # of rollouts and updates
    episodes: int  # those that `success` is of: the last WINDOW, or all so far if those are fewer
    success: float


def evaluation_rows(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    return [row for row in rows if GREEDY in row]


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


def draw(folder: Path, path: Path) -> None:
    """Write a PNG: training success as lines, greedy success on held-out states as circles, the teacher's dashed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    variants = sorted({file.parent for file in folder.glob("*/seed_*.jsonl")})
    for i, variant in enumerate(variants):
        for seed, file in enumerate(sorted(variant.glob("seed_*.jsonl"))):
            label = variant.name if seed == 0 else None
            draw_run(axes, read_metrics(file), color=f"C{i % 10}", label=label)
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


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning_report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="folder of variants")
    parser.add_argument("--picture", type=Path, help="PNG to write (default: FOLDER/learning.png)")
    arguments = parser.parse_args(argv)
    if not arguments.folder.is_dir():
        raise BadInput(f"{arguments.folder} is no folder: give the one whose subfolders are variants")
    draw(arguments.folder, arguments.picture or arguments.folder / "learning.png")


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.learning_report", main))
