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

import matplotlib.pyplot as plt

from rl.metrics import Successes

SAMPLED, GREEDY = "eval/student_sampled_success", "eval/student_success"
WAYS = {SAMPLED: ("sampled student", "#0072b2"), GREEDY: ("greedy student", "#d55e00")}
GREY, INK = "#999999", "#222222"


@dataclass(frozen=True)
class Variant:
    name: str
    seeds: list[list[dict[str, Any]]]  # rows of metrics.jsonl

    def evaluations(self) -> list[list[dict[str, Any]]]:
        return [[row for row in rows if GREEDY in row] for rows in self.seeds]

    def counts(self, key: str, which: int) -> Successes:
        """All seeds together; which: 0 for the first evaluation, -1 for the last one."""
        rows = [evaluations[which] for evaluations in self.evaluations()]
        return Successes(sum(int(row[f"{key}_k"]) for row in rows), sum(int(row[f"{key}_n"]) for row in rows))

    def changes(self, key: str) -> list[float]:
        """Per seed, in points."""
        return [100 * (rows[-1][key] - rows[0][key]) for rows in self.evaluations()]

    def seconds(self, phase: int) -> float:
        """Wall time of rollouts and updates in a phase, mean over the seeds."""
        of_phase = [[row for row in rows if row.get("schedule/phase") == phase] for rows in self.seeds]
        spent = [sum(row["rollout/time_s"] + row.get("time/update", 0.0) for row in rows) for rows in of_phase]
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
        for key in WAYS:
            changes = ", ".join(f"{change:+.0f}" for change in variant.changes(key))
            cells += [str(variant.counts(key, 0)), str(variant.counts(key, -1)), changes]
        cells.append(", ".join(f"{variant.seconds(phase):.0f}" for phase in range(3)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(variant: Variant, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for rows in variant.seeds:
        rollouts = [(row["global_step"], row["rollout/success_rate"]) for row in rows if "rollout/success_rate" in row]
        axis.plot(*zip(*rollouts, strict=True), ".", color=GREY)
    for key, (label, colour) in WAYS.items():
        points = list(zip(*variant.evaluations(), strict=True))
        steps = [statistics.mean(row["global_step"] for row in point) for point in points]
        rates = [[row[key] for row in point] for point in points]
        axis.plot(steps, [statistics.mean(r) for r in rates], "o-", color=colour, label=label)
        axis.fill_between(steps, [min(r) for r in rates], [max(r) for r in rates], color=colour, alpha=0.15)
    axis.set(xlabel="env steps", ylabel="success rate", ylim=(-0.03, 1.03))
    axis.set_title(f"{variant.name}: mean and range of {len(variant.seeds)} seeds; dots: training rollouts", fontsize=9)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def compare(variants: Sequence[Variant], path: Path) -> None:
    """Sampled and greedy success after training side by side, best first, with the rate before it."""
    ranked = sorted(variants, key=lambda variant: variant.counts(SAMPLED, -1).rate)
    figure, axes = plt.subplots(1, 2, figsize=(9, 1.2 + 0.32 * len(ranked)), sharey=True, layout="constrained")
    for axis, (key, (label, colour)) in zip(axes, WAYS.items(), strict=True):
        for row, variant in enumerate(ranked):
            before, after = variant.counts(key, 0), variant.counts(key, -1)
            axis.plot(after.interval, [row, row], color=colour, linewidth=2)
            axis.plot(after.rate, row, "o", color=colour)
            axis.plot(before.rate, row, "|", color=GREY, markersize=12)
            ends = [rows[-1][key] for rows in variant.evaluations()]
            axis.plot(ends, [row] * len(ends), ".", color=INK, markersize=4)
        axis.set(xlim=(0, 1), xlabel="success rate", title=label)
    axes[0].set_yticks(range(len(ranked)), [variant.name for variant in ranked])
    figure.suptitle("after training: all seeds with 95 % interval; dots: each seed; grey: before", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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
