"""What perturbations cost a policy: every kind and magnitude against the same initial states unperturbed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from envs.perturb import NONE
from experiment.results import Results, compare, successes


def perturbation_table(results: Results, labels: Sequence[str], before: Results | None = None) -> list[str]:
    """A line for each label; with `before`, another policy, also its success and what has changed since."""
    rows: list[tuple[str, ...]] = [("perturbed by", "success", "against unperturbed")]
    rows[0] += () if before is None else ("before", "after - before")
    for label in (NONE, *labels):
        played = results.of(perturbation=label)
        cost = "" if label == NONE else str(compare(results.of(), played))
        row: tuple[str, ...] = (label, str(successes(played)), cost)
        if before is not None and (pairs := compare(before.of(perturbation=label), played)).n:
            row = (*row, str(pairs.before), str(pairs))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def draw_perturbations(results: Results, labels: Sequence[str], before: Results | None, path: Path) -> Path:
    """A panel for each kind: success by magnitude with 95 % intervals; magnitude 0 is the unperturbed episodes."""
    kinds = list(dict.fromkeys(label.partition("-")[0] for label in labels))
    figure = Figure(figsize=(2.2 * len(kinds) + 1, 2.8), layout="constrained")
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        of_kind = [NONE, *(label for label in labels if label.startswith(f"{kind}-"))]
        magnitudes = [0, *(int(label.rpartition("-")[2]) for label in of_kind[1:])]
        for policy, name, colour in ((before, "before", "#999999"), (results, "this policy", "C0")):
            if policy is not None and all(policy.of(perturbation=label) for label in of_kind):
                found = [successes(policy.of(perturbation=label)) for label in of_kind]
                reach = [[s.rate - s.interval[0] for s in found], [s.interval[1] - s.rate for s in found]]
                rates = [s.rate for s in found]
                panel.errorbar(magnitudes, rates, reach, marker="o", capsize=3, color=colour, label=name)
        panel.set(title=kind, xlabel="magnitude", ylim=(-0.03, 1.03), xticks=magnitudes)
    panels[0].set_ylabel("success rate")
    if before is not None:
        panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    return path
