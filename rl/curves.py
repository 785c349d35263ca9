"""The curves of a run, drawn from metrics.jsonl. What a good one looks like: templates/panels.json."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use("Agg")
matplotlib.rcParams["text.parse_math"] = False  # names of runs may hold dollar signs

TEACHER, GREEDY, SAMPLED = "eval/teacher_success", "eval/student_success", "eval/student_sampled_success"
WALL_PARTS = {
    "rollout/time_s": "rollout", "time/update": "update", "time/eval": "evaluation", "time/checkpoint": "checkpoint",
}  # fmt: skip

# Each can be read on a light and on a dark page.
COLOURS = {TEACHER: "#c07830", GREEDY: "#3c82c8", SAMPLED: "#3a9d67"}
CYCLE = ["#3f83f0", "#e0606e", "#9a7cc8", "#d09a26", "#48a0a6"]
PHASE_COLOURS = ["#e8b04018", "#4090e018", "#40c06018"]  # warmup, transition, RL; red, green, blue, opacity
GREY = "#808890"
STYLE = {
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.prop_cycle": plt.cycler(color=CYCLE), "axes.grid": True,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#80889040",
    "legend.fontsize": 8, "legend.framealpha": 0.3, "lines.markersize": 4, "svg.fonttype": "none",
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), GREY),
}  # fmt: skip
TEMPLATES = Path(__file__).parent / "templates"

Row = Mapping[str, Any]  # of metrics.jsonl


class Panel(NamedTuple):
    """Metrics that are read together, metric -> label; those on the `right` have an axis of their own."""

    title: str
    reading: str
    left: Mapping[str, str]
    right: Mapping[str, str] = {}
    log_scale: bool = False

    def has_data(self, rows: Sequence[Row]) -> bool:
        return any(row.get(key) is not None for row in rows for key in (*self.left, *self.right))


PANELS = {panel["title"]: Panel(**panel) for panel in json.loads((TEMPLATES / "panels.json").read_text())}
SUCCESS_READING = (
    "Held-out initial states, bars are 95 % Wilson intervals. Good: the sampled student ends above where it began by "
    "more than the bars, the greedy one does not lose, and by the end of the warmup both are near the teacher. Dots: "
    "training rollouts."
)
TIME_READING = "Seconds of wall time per update; evaluations and checkpoints are counted at the update before them."


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Env steps and values of a metric where it was recorded."""
    present = [row for row in rows if row.get(key) is not None]
    return [row["global_step"] for row in present], [row[key] for row in present]


def draw_success(axis: plt.Axes, rows: Sequence[Row]) -> None:
    """Evaluated success rates with their intervals, and the training rollouts."""
    axis.plot(*series(rows, "rollout/success_rate"), ".", color=GREY, label="training rollouts")
    for key, label in ((TEACHER, "teacher"), (GREEDY, "student, greedy"), (SAMPLED, "student, sampled")):
        steps, rates = series(rows, key)
        low, high = series(rows, f"{key}_low")[1], series(rows, f"{key}_high")[1]
        errors = [[r - a for r, a in zip(rates, low, strict=True)], [b - r for r, b in zip(rates, high, strict=True)]]
        if steps:
            axis.errorbar(steps, rates, yerr=errors, marker="o", capsize=3, label=label, color=COLOURS[key])
    axis.set_ylim(-0.03, 1.03)
    shade_phases(axis, rows)
    head(axis, "Success rate")


def draw_panel(axis: plt.Axes, rows: Sequence[Row], panel: Panel) -> None:
    """The panel's metrics against env steps; one that was never recorded is left out."""
    shade_phases(axis, rows)
    sides = [(axis, panel.left, "o-")] + ([(axis.twinx(), panel.right, "s--")] if panel.right else [])
    drawn: list[Any] = []
    for side, metrics, style in sides:
        for key, label in metrics.items():
            steps, values = series(rows, key)
            if steps:
                drawn += side.plot(steps, values, style, label=label, color=CYCLE[len(drawn)])
            if panel.log_scale and max(values, default=0) > 0:
                side.set_yscale("log")
    if panel.right:
        sides[1][0].grid(False)
        sides[1][0].set_ylabel("dashed", fontsize=8)
    head(axis, panel.title, drawn)


def draw_time(axis: plt.Axes, rows: Sequence[Row]) -> None:
    """Wall time of every update, stacked by what it was spent on."""
    spent: dict[int, dict[str, float]] = {}
    for row in rows:
        parts = spent.setdefault(row["update"], dict.fromkeys(WALL_PARTS, 0.0))
        for key in WALL_PARTS:
            parts[key] += row.get(key) or 0.0
    bottom = [0.0] * len(spent)
    for key, label in WALL_PARTS.items():
        seconds = [parts[key] for parts in spent.values()]
        axis.bar(list(spent), seconds, bottom=bottom, label=label)
        bottom = [a + b for a, b in zip(bottom, seconds, strict=True)]
    axis.set(xlabel="update", ylabel="seconds")
    head(axis, "Time")


def draw_overlaid(axis: plt.Axes, runs: Mapping[str, Sequence[Row]], key: str) -> None:
    """One metric of every run (by name) against env steps, evaluated rates with their intervals."""
    for number, (name, rows) in enumerate(runs.items()):
        steps, values = series(rows, key)
        (line,) = axis.plot(steps, values, "os^Dv"[number // len(CYCLE) % 5] + "-", label=name)
        low, high = series(rows, f"{key}_low")[1], series(rows, f"{key}_high")[1]
        if low:
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axis.set_xlabel("env steps")
    head(axis, key, None if key == SAMPLED else [])


def shade_phases(axis: plt.Axes, rows: Sequence[Row]) -> None:
    """Colour the background by the phase of every update: warmup, transition, RL."""
    start = 0
    for row in rows:
        if "schedule/phase" in row:
            axis.axvspan(start, row["global_step"], color=PHASE_COLOURS[int(row["schedule/phase"])], linewidth=0)
            start = row["global_step"]
    axis.set_xlabel("env steps")


def head(axis: plt.Axes, title: str, drawn: Sequence | None = None) -> None:
    axis.set_title(title, loc="left")
    handles = axis.get_legend_handles_labels()[0] if drawn is None else drawn
    if handles:
        axis.legend(handles=handles)


def svg(draw: Callable[[plt.Axes], None], wide: bool = False) -> str:
    """What `draw` puts on an axis, as an <svg> element."""
    with plt.rc_context({**STYLE, "svg.hashsalt": "the same drawing is the same text"}):
        figure, axis = plt.subplots(figsize=(13.5, 4.0) if wide else (4.9, 2.9), layout="constrained")
        draw(axis)
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
        plt.close(figure)
    text = file.getvalue()
    return re.sub(r'(<g) id="[^"]*"', r"\1", text[text.index("<svg") :])  # not unique in a page of several


def plot_curves(rows: Sequence[Row], title: str, path: Path) -> None:
    """The four most important curves as one picture."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
        draw_success(axes[0, 0], rows)
        draw_panel(axes[0, 1], rows, PANELS["Warmup: distillation"])
        draw_panel(axes[1, 0], rows, PANELS["Policy change within an update"])
        draw_time(axes[1, 1], rows)
        figure.suptitle(title)
        figure.savefig(path, dpi=110)
        plt.close(figure)
