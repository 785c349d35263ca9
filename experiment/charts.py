"""The charts of the report page: success in the evaluations, and what was recorded for every update."""

import base64
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiment.run_folder import MetricsRow
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


@dataclass(frozen=True)
class Panel:
    """Metrics that are drawn in one chart, and what good curves look like (HTML)."""

    title: str
    reading: str
    metrics: Mapping[str, str]  # metric -> label


PANELS = (
    Panel(
        "Training rollouts",
        "Success of the training episodes. It may drop when the student begins to act, then it rises.",
        {"rollout/success_rate": "success rate"},
    ),
    Panel(
        "Agreement with the teacher",
        "In the warmup. Good: it rises; if it is flat, raise <code>--warmup-lr</code>.",
        {"distill/accuracy": "share of tokens"},
    ),
    Panel(
        "Advantages",
        "The spread is what can be learned from. If the share of zeros stays at 1, all episodes end alike: use longer "
        "rollouts, other tasks, or <code>--dynamic-sampling</code>.",
        {"advantage/std": "standard deviation", "train/zero_advantage_fraction": "share that is 0"},
    ),
    Panel(
        "Policy change by an update",
        "In nats a token. At 0 nothing is learned; if it climbs, lower <code>--desired-kl</code> or "
        "<code>--n-epochs</code>.",
        {"train/approx_kl": "approximate KL"},
    ),
    Panel(
        "Entropy",
        "In nats a token. If it falls to 0 within a few updates, the policy stops exploring: raise "
        "<code>--temperature</code>.",
        {"train/entropy": "entropy"},
    ),
    Panel(
        "Wall time",
        "Seconds of each update and its rollout, and of evaluations.",
        {"rollout/time_s": "rollout", "time/update": "update", "time/eval": "evaluation"},
    ),
)


def draw_panels(rows: Sequence[MetricsRow]) -> Iterator[tuple[Panel, str]]:
    """The panels of which something was recorded, each with its picture."""
    for panel in PANELS:
        curves = {label: _points(rows, metric) for metric, label in panel.metrics.items()}
        if any(curves.values()):
            with rc_context(STYLE):
                figure = Figure(figsize=(4, 1.9), layout="constrained")
                axes = figure.subplots()
                for label, points in curves.items():
                    if points:
                        axes.plot(*zip(*points, strict=True), marker=".", label=label)
                _finish(axes, rows, legend=len(panel.metrics) > 1)
                yield panel, _svg(figure)


def _points(rows: Sequence[MetricsRow], metric: str) -> list[tuple[float, float]]:
    return [(row["global_step"], row[metric]) for row in rows if metric in row]


def draw_success(evaluations: Sequence[Evaluation], rows: Sequence[MetricsRow]) -> str:
    """Success of the student against env steps, with 95 % intervals, and the teacher's as a line."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        axes = figure.subplots()
        for rule in ("sampled", "greedy"):
            played = [evaluation for evaluation in evaluations if rule in evaluation.episodes]
            rates = [evaluation.rates[rule] for evaluation in played]
            below = [rate.rate - rate.interval[0] for rate in rates]
            above = [rate.interval[1] - rate.rate for rate in rates]
            steps = [evaluation.env_steps for evaluation in played]
            axes.errorbar(
                steps, [rate.rate for rate in rates], [below, above], marker="o", capsize=3, label=rule
            )
        if "teacher" in evaluations[0].episodes:
            axes.axhline(evaluations[0].rates["teacher"].rate, color=GREY, linestyle="--", label="teacher")
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.set_xlabel("env steps of training")
        _finish(axes, rows, legend=True)
        return _svg(figure)


def _finish(axes: Axes, rows: Sequence[MetricsRow], legend: bool) -> None:
    """Shade the warmup and the transition, and write numbers and names."""
    start = 0.0
    for row in rows:
        if "schedule/phase" in row:
            phase = list(Phase)[int(row["schedule/phase"])].value
            if phase in SHADES:
                axes.axvspan(start, row["global_step"], color=SHADES[phase], alpha=0.2, linewidth=0)
            start = row["global_step"]
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=GREY, alpha=0.25)
    if legend:
        axes.legend(frameon=False)


def _svg(figure: Figure) -> str:
    """The picture as the value of a `src` attribute."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True)
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
