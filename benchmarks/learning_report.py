"""Table and pictures of what benchmarks/learning.py left: python -m benchmarks.learning_report OUT [--pictures FOLDER]

For every variant the counts of all its seeds before and after training, with Wilson intervals, and per seed the change;
one picture compares the variants, and one each shows its curves: the mean over the seeds and the range between them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from rl.evaluation import Successes

WAYS = {
    "eval/teacher_success": ("teacher", "#b5651d"),
    "eval/student_success": ("student, greedy", "#1b5e9e"),
    "eval/student_sampled_success": ("student, sampled", "#2e8b57"),
}
PHASES = ("#fdf0d5", "#e3eef9", "#e8f5e9")  # warmup, transition, RL: as rl.report


@dataclass(frozen=True)
class Variant:
    name: str
    seeds: list[list[dict[str, Any]]]  # rows of metrics.jsonl

    def evaluations(self) -> list[list[dict[str, Any]]]:
        return [[row for row in rows if "eval/student_success" in row] for rows in self.seeds]

    def counts(self, key: str, which: int) -> Successes:
        """All seeds together; which: 0 for the first evaluation, -1 for the last one."""
        rows = [evaluations[which] for evaluations in self.evaluations()]
        return Successes(sum(int(r[f"{key}_k"]) for r in rows), sum(int(r[f"{key}_n"]) for r in rows))

    def changes(self, key: str) -> list[float]:
        """Per seed, in points."""
        return [100 * (rows[-1][key] - rows[0][key]) for rows in self.evaluations()]

    def seconds(self, phase: int) -> float:
        """Wall time of rollouts and updates in a phase, mean over the seeds."""
        spent = [
            sum(
                row["rollout/time_s"] + row.get("time/update", 0.0)
                for row in rows
                if row.get("schedule/phase") == phase
            )
            for rows in self.seeds
        ]
        return statistics.mean(spent)


def read_variants(folder: Path) -> list[Variant]:
    variants = []
    for variant in sorted(path for path in folder.iterdir() if any(path.glob("seed_*.jsonl"))):
        files = sorted(variant.glob("seed_*.jsonl"))
        rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        variants.append(Variant(variant.name, rows))
    return variants


def table(variants: Sequence[Variant]) -> str:
    lines = [
        "| variant | seeds | sampled before | sampled after | change per seed | greedy before | greedy after | "
        "change per seed | s in warmup, transition, RL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        cells = [variant.name, str(len(variant.seeds))]
        for key in ("eval/student_sampled_success", "eval/student_success"):
            changes = ", ".join(f"{change:+.0f}" for change in variant.changes(key))
            cells += [str(variant.counts(key, 0)), str(variant.counts(key, -1)), changes]
        cells.append(", ".join(f"{variant.seconds(phase):.0f}" for phase in range(3)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(variant: Variant, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for rows in variant.seeds:
        played = [row for row in rows if "rollout/success_rate" in row]
        axis.plot(
            [row["global_step"] for row in played],
            [row["rollout/success_rate"] for row in played],
            ".",
            color="#999999",
        )
    for key, (label, colour) in WAYS.items():
        points = list(zip(*variant.evaluations(), strict=True))
        steps = [statistics.mean(row["global_step"] for row in point) for point in points]
        rates = [[row[key] for row in point] for point in points]
        axis.plot(steps, [statistics.mean(r) for r in rates], "o-", color=colour, label=label)
        axis.fill_between(steps, [min(r) for r in rates], [max(r) for r in rates], color=colour, alpha=0.15)
    _shade(axis, variant.seeds[0])
    axis.set(xlabel="env steps", ylabel="success rate", ylim=(-0.03, 1.03))
    axis.set_title(f"{variant.name}: mean and range of {len(variant.seeds)} seeds; dots: training rollouts")
    axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def compare(variants: Sequence[Variant], path: Path) -> None:
    """Sampled and greedy success after training side by side, best first, with the rate before it."""
    ways = [(key, *WAYS[key]) for key in ("eval/student_sampled_success", "eval/student_success")]
    ranked = sorted(variants, key=lambda variant: variant.counts(ways[0][0], -1).rate)
    figure, axes = plt.subplots(1, 2, figsize=(9, 1.2 + 0.32 * len(ranked)), sharey=True, constrained_layout=True)
    for axis, (key, label, colour) in zip(axes, ways, strict=True):
        for row, variant in enumerate(ranked):
            before, after = variant.counts(key, 0), variant.counts(key, -1)
            low, high = after.interval
            axis.plot([low, high], [row, row], color=colour, linewidth=2)
            axis.plot(after.rate, row, "o", color=colour)
            axis.plot(before.rate, row, "|", color="#777777", markersize=12)
            ends = [rows[-1][key] for rows in variant.evaluations()]
            axis.plot(ends, [row] * len(ends), ".", color="#222222", markersize=4)
        axis.set(xlim=(0, 1), xlabel="success rate", title=label)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(ranked)), [variant.name for variant in ranked])
    figure.suptitle("after training: all seeds with 95 % interval; dots: each seed; grey: before", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _shade(axis: plt.Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Colour the background by the phase of every update."""
    start = 0
    for row in rows:
        if "schedule/phase" in row:
            axis.axvspan(start, row["global_step"], color=PHASES[int(row["schedule/phase"])], zorder=0, linewidth=0)
            start = row["global_step"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning_report", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder that benchmarks.learning wrote")
    parser.add_argument("--pictures", type=Path, help="folder for the PNGs (default: OUT)")
    arguments = parser.parse_args()
    variants = read_variants(arguments.out)
    print(table(variants))
    pictures = arguments.pictures or arguments.out
    pictures.mkdir(parents=True, exist_ok=True)
    compare(variants, pictures / "comparison.png")
    for variant in variants:
        plot(variant, pictures / f"{variant.name}.png")


if __name__ == "__main__":
    main()
