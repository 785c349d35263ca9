"""The charts of the report page, as SVG: success in the evaluations, and what was recorded for every update."""

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiment.stored_run import MetricsRow
from experiment.verdict import Evaluation
from rl.phases import Phase

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells when it makes its cache of fonts

GREY = "#7a8490"  # readable on white and on black
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
SHADES = {"warmup": "#f1c232", "transition": "#6aa2e8"}


def draw_success(evaluations: Sequence[Evaluation], rows: Sequence[MetricsRow]) -> bytes:
    """Success of the student against env steps, with 95 % intervals; the teacher's and that in training as lines."""
    training = [
        (row["global_step"], row["rollout/success_rate"]) for row in rows if "rollout/success_rate" in row
    ]
    picture = io.BytesIO()
    with chart(picture, (6.2, 3), rows) as axes:
        if training:
            axes.plot(*zip(*training, strict=True), color=GREY, linewidth=1, label="training episodes")
        for rule in ("sampled", "greedy"):
            played = [evaluation for evaluation in evaluations if rule in evaluation.rates]
            rates = [evaluation.rates[rule] for evaluation in played]
            below = [rate.rate - rate.interval[0] for rate in rates]
            above = [rate.interval[1] - rate.rate for rate in rates]
            steps = [evaluation.env_steps for evaluation in played]
            shares = [rate.rate for rate in rates]
            axes.errorbar(steps, shares, [below, above], marker="o", capsize=3, label=rule)
        if "teacher" in evaluations[0].rates:
            axes.axhline(evaluations[0].rates["teacher"].rate, color=GREY, linestyle="--", label="teacher")
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.set_xlabel("env steps of training")
    return picture.getvalue()


def draw_metrics(rows: Sequence[MetricsRow], labels: Mapping[str, str]) -> bytes | None:
    """Metrics against env steps, each with its label; None if there is no curve: none was recorded more than once."""
    curves = {
        label: [(row["global_step"], row[metric]) for row in rows if metric in row]
        for metric, label in labels.items()
    }
    if all(len(points) < 2 for points in curves.values()):
        return None
    picture = io.BytesIO()
    with chart(picture, (4, 1.9), rows) as axes:
        for label, points in curves.items():
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=label)
    return picture.getvalue()


@contextmanager
def chart(picture: io.BytesIO, size: tuple[float, float], rows: Sequence[MetricsRow]) -> Iterator[Axes]:
    """Axes to draw on in this block, which are then written to `picture`. Warmup and transition are shaded."""
    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        yield axes
        start = 0.0
        for row in rows:
            if "schedule/phase" in row:
                phase = list(Phase)[int(row["schedule/phase"])].value
                if phase in SHADES:
                    axes.axvspan(start, row["global_step"], color=SHADES[phase], alpha=0.2, linewidth=0)
                start = row["global_step"]
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y", color=GREY, alpha=0.25)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(frameon=False)
        figure.savefig(picture, format="svg", transparent=True)
