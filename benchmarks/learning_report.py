"""Table and picture of several runs: python -m benchmarks.learning_report FOLDER [--picture FILE]

FOLDER/VARIANT/seed_S.jsonl is the metrics.jsonl of one run. For every variant: greedy success of all its seeds before
and after training with Wilson intervals, after how many env steps and minutes of rollouts and updates the success of
the last WINDOW training episodes has reached a level, and the success of the training episodes between two numbers of
env steps (--between), all seeds and each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

from experiment.run_folder import MetricsRow, read_metrics
from experiment.statistics import Successes

GREEDY, TEACHER = "eval/student_success", "eval/teacher_success"
WINDOW = 50  # episodes
LEVELS = (0.5, 0.75, 0.9)


@dataclass(frozen=True)
class Point:
    """Where a run stood after an update."""

    env_steps: int
    minutes: float
    success: float  # of its last WINDOW episodes, or of all if there are fewer


@dataclass(frozen=True)
class Variant:
    name: str
    seeds: list[list[MetricsRow]]  # rows of metrics.jsonl

    def evaluated(self) -> list[list[MetricsRow]]:
        """Per seed that was evaluated before and after, the rows of its evaluations."""
        return [found for rows in self.seeds if len(found := [row for row in rows if GREEDY in row]) > 1]

    def greedy(self, which: int) -> str:
        """All seeds together; which: 0 for the first evaluation, -1 for the last one."""
        rows = [evaluated[which] for evaluated in self.evaluated()]
        if not rows:
            return "-"
        return str(
            Successes(
                sum(int(row[f"{GREEDY}_k"]) for row in rows), sum(int(row[f"{GREEDY}_n"]) for row in rows)
            )
        )

    def gains(self) -> list[float]:
        """Per seed, of greedy success over the teacher, in points."""
        return [100 * (rows[-1][GREEDY] - rows[-1][TEACHER]) for rows in self.evaluated()]

    def between(self, first: int, last: int) -> str:
        """Success of the training episodes whose update ended after `first` env steps, up to `last`."""
        seeds = []
        for rows in self.seeds:
            counted = [
                row for row in rows if first < row["global_step"] <= last and "rollout/success_rate" in row
            ]
            numbers = [int(row["rollout/trajectories"]) for row in counted]
            successes = [
                round(row["rollout/success_rate"] * n) for row, n in zip(counted, numbers, strict=True)
            ]
            seeds.append(Successes(sum(successes), sum(numbers)))
        each = ", ".join(f"{100 * seed.k / seed.n:.0f}" for seed in seeds)
        return f"{Successes(sum(seed.k for seed in seeds), sum(seed.n for seed in seeds))} ({each})"


def curve(rows: Sequence[MetricsRow]) -> list[Point]:
    points, episodes, seconds = [], [], 0.0
    for row in rows:
        if "rollout/success_rate" in row:
            n = int(row["rollout/trajectories"])
            k = round(row["rollout/success_rate"] * n)
            episodes = (episodes + [1.0] * k + [0.0] * (n - k))[-max(WINDOW, n) :]
            seconds += row["rollout/time_s"] + row.get("time/update", 0.0)
            points.append(Point(row["global_step"], seconds / 60, sum(episodes) / len(episodes)))
    return points


def reached(points: Sequence[Point], level: float) -> str:
    """Thousands of env steps, and minutes."""
    first = next((point for point in points if point.success >= level), None)
    return "-" if first is None else f"{first.env_steps / 1000:.0f}k ({first.minutes:.0f} min)"


def read_variants(folder: Path) -> list[Variant]:
    variants = []
    for variant in sorted(path for path in folder.iterdir() if any(path.glob("seed_*.jsonl"))):
        files = sorted(variant.glob("seed_*.jsonl"))
        variants.append(Variant(variant.name, [read_metrics(file) for file in files]))
    return variants


def table(variants: Sequence[Variant], between: tuple[int, int]) -> str:
    heads = ["variant", "greedy before", "greedy after", "above the teacher, points", "env steps"]
    heads += [f"rollouts at {100 * level:.0f} %" for level in LEVELS]
    heads.append(f"training episodes from {between[0]:,} to {between[1]:,} env steps")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for variant in variants:
        curves = [curve(rows) for rows in variant.seeds]
        gains = ", ".join(f"{gain:+.0f}" for gain in variant.gains())
        steps = ", ".join(f"{points[-1].env_steps:,}" for points in curves)
        cells = [variant.name, variant.greedy(0), variant.greedy(-1), gains, steps]
        cells += [", ".join(reached(points, level) for points in curves) for level in LEVELS]
        cells.append(variant.between(*between))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(variants: Sequence[Variant], path: Path) -> None:
    """Success of the rollouts as lines, greedy success on held-out states as circles, the teacher's dashed."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, variant in enumerate(variants):
        for seed, rows in enumerate(variant.seeds):
            points, evaluations = curve(rows), [row for row in rows if GREEDY in row]
            colour, label = f"C{number % 10}", variant.name if seed == 0 else None
            axis.plot([p.env_steps for p in points], [p.success for p in points], color=colour, label=label)
            axis.plot(
                [row["global_step"] for row in evaluations],
                [row[GREEDY] for row in evaluations],
                "o",
                color=colour,
            )
            for row in evaluations[:1]:
                axis.axhline(row[TEACHER], color="#999999", linestyle="--", linewidth=1)
    axis.set(xlabel="env steps", ylabel="success rate", ylim=(-0.03, 1.03))
    axis.set_title(
        "lines: training episodes; circles: greedy, held-out states; dashed: the teacher", fontsize=9
    )
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning_report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="folder of variants")
    parser.add_argument("--picture", type=Path, help="PNG to write (default: FOLDER/learning.png)")
    parser.add_argument("--between", type=int, nargs=2, default=(0, 10**9), help="env steps")
    arguments = parser.parse_args()
    variants = read_variants(arguments.folder)
    print(table(variants, tuple(arguments.between)))
    draw(variants, arguments.picture or arguments.folder / "learning.png")


if __name__ == "__main__":
    main()
