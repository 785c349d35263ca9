"""The curves of a run as one picture: `report/curves.png`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from configs.config import TrainConfig
from rl.evaluation import Successes
from rl.phases import Phase, last_step, phase_lengths
from rl.run import read_metrics

PHASE_COLOURS = {Phase.WARMUP: "#fdf0d5", Phase.TRANSITION: "#e3eef9", Phase.RL: "#e8f5e9"}
EVALUATIONS = {
    "eval/teacher_success": ("teacher", "#b5651d"),
    "eval/student_success": ("student, greedy", "#1b5e9e"),
    "eval/student_sampled_success": ("student, sampled", "#2e8b57"),
}


def plot_curves(folder: Path, config: TrainConfig) -> Path:
    """Draw success, distillation, policy-gradient and time curves against env steps, phases shaded."""
    rows = read_metrics(folder)
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    _success(axes[0, 0], rows)
    _lines(axes[0, 1], rows, {"distill/loss": "distillation loss (nats)"}, "warmup")
    _lines(axes[0, 1].twinx(), rows, {"distill/accuracy": "agreement with the teacher"}, None, first_colour=1)
    _lines(
        axes[1, 0],
        rows,
        {"train/clip_fraction": "clip fraction", "train/approx_kl": "approx. KL", "train/ratio_mean": "mean ratio"},
        "policy gradient",
    )
    _lines(
        axes[1, 1],
        rows,
        {f"time/{part}": part for part in ("sim", "render", "infer", "update")},
        "seconds of an update",
    )
    for axis in axes.flat:
        _shade(axis, config)
        axis.set_xlabel("env steps")
    figure.suptitle(folder.name)
    path = folder / "report" / "curves.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def before_and_after(folder: Path) -> list[str]:
    """What training has changed, from the first and the last evaluation of a run: one line per way of acting."""
    evaluations = [row for row in read_metrics(folder) if "eval/student_success" in row]
    lines = []
    for key, label in (("eval/student_sampled_success", "sampled"), ("eval/student_success", "greedy")):
        first, last = (
            Successes(int(row[f"{key}_k"]), int(row[f"{key}_n"])) for row in (evaluations[0], evaluations[-1])
        )
        lines.append(f"{label} success on held-out initial states: {first} before, {last} after")
    return lines


def _success(axis: plt.Axes, rows: list[dict[str, Any]]) -> None:
    steps, rates = _series(rows, "rollout/success_rate")
    axis.plot(steps, rates, ".", color="#888888", label="training rollouts")
    for key, (label, colour) in EVALUATIONS.items():
        steps, rates = _series(rows, key)
        low, high = _series(rows, f"{key}_low")[1], _series(rows, f"{key}_high")[1]
        if not steps:
            continue
        errors = [[r - a for r, a in zip(rates, low, strict=True)], [b - r for r, b in zip(rates, high, strict=True)]]
        axis.errorbar(steps, rates, yerr=errors, marker="o", capsize=3, label=label, color=colour)
    axis.set_ylim(-0.03, 1.03)
    axis.set_title("success rate (bars: 95 % interval)")
    axis.legend(fontsize=8)


def _lines(
    axis: plt.Axes, rows: list[dict[str, Any]], keys: dict[str, str], title: str | None, first_colour: int = 0
) -> None:
    for offset, (key, label) in enumerate(keys.items()):
        steps, values = _series(rows, key)
        axis.plot(steps, values, ".-", label=label, color=f"C{first_colour + offset}")
    if title is not None:
        axis.set_title(title)
    if title is not None and not any(key in row for row in rows for key in keys):
        axis.text(0.5, 0.5, "nothing recorded yet", ha="center", transform=axis.transAxes, color="#888888")
    axis.legend(fontsize=8, loc="upper right" if first_colour == 0 else "lower right")


def _series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    present = [row for row in rows if row.get(key) is not None]
    return [row["global_step"] for row in present], [row[key] for row in present]


def _shade(axis: plt.Axes, config: TrainConfig) -> None:
    warmup, transition = phase_lengths(config.phases)
    end = last_step(config.phases)
    edges = (0, min(warmup, end), min(warmup + transition, end), end)
    for phase, left, right in zip(PHASE_COLOURS, edges, edges[1:], strict=False):
        if right > left:
            axis.axvspan(left, right, color=PHASE_COLOURS[phase], zorder=0, lw=0)
