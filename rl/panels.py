"""The curves of a run: what is drawn, in which colours, and what a good curve looks like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from rl.stored_run import GREEDY, SAMPLED, TEACHER, Row, series

# name -> (on light, on dark); reports swap the former for CSS variables, so no colour may occur twice
COLOURS = {
    "ink": ("#24292f", "#d7dde4"),
    "muted": ("#8a929b", "#7d8793"),
    "grid": ("#dfe3e8", "#323a45"),
    "warmup": ("#fdf0d5", "#3a3020"),
    "transition": ("#e3eef9", "#1d2f45"),
    "rl": ("#e8f5e9", "#1b3324"),
    "teacher": ("#b5651d", "#e39b57"),
    "greedy": ("#1b5e9e", "#6cb2f5"),
    "sampled": ("#2e8b57", "#5fd394"),
    "c0": ("#1f6feb", "#70a9ff"),
    "c1": ("#d1495b", "#ff8b98"),
    "c2": ("#7b5ea7", "#bfa2ee"),
    "c3": ("#c68a12", "#edbd55"),
    "c4": ("#3c8d93", "#6fd0d7"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
CYCLE = [LIGHT[f"c{i}"] for i in range(5)]
PHASE_COLOURS = (LIGHT["warmup"], LIGHT["transition"], LIGHT["rl"])  # by the number that schedule/phase records
WAYS = {  # of acting in an evaluation
    TEACHER: ("teacher", LIGHT["teacher"]),
    GREEDY: ("student, greedy", LIGHT["greedy"]),
    SAMPLED: ("student, sampled", LIGHT["sampled"]),
}
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.prop_cycle": plt.cycler(color=CYCLE),
    "axes.edgecolor": LIGHT["grid"],
    "axes.axisbelow": True,
    "axes.labelcolor": LIGHT["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.6,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["ink"],
    "ytick.color": LIGHT["ink"],
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
}


@dataclass(frozen=True)
class Panel:
    """Metrics that are read together; `right` has an axis of its own."""

    title: str
    reading: str
    left: Mapping[str, str]  # metric -> label
    right: Mapping[str, str] = field(default_factory=dict)
    log_scale: bool = False
    from_zero: bool = False

    def has_data(self, rows: Sequence[Row]) -> bool:
        return any(row.get(key) is not None for row in rows for key in (*self.left, *self.right))


DISTILLATION = Panel(
    "Warmup: distillation",
    "The loss falls and flattens, the agreement rises (the bundled small policy: from 0.82 to 0.9). A flat loss: raise "
    "--warmup-lr. Still falling steeply at the end: raise --warmup-steps.",
    {"distill/loss": "loss (nats)"},
    {"distill/accuracy": "agreement with the teacher"},
)
DRIFT = Panel(
    "Policy change within an update",
    "Of one order throughout; in good runs of the small policy KL lies at 0.02 to 0.06 and the clip fraction near 0.1. "
    "Climbing from update to update: lower --lr or --n-epochs, or set --target-kl. Both at 0: nothing is learnt.",
    {"train/approx_kl": "approx. KL"},
    {"train/clip_fraction": "clip fraction"},
    from_zero=True,
)
PANELS = (
    DISTILLATION,
    Panel(
        "Training rollouts",
        "In the warmup the teacher acts; with the hand-over to the sampling student the share of successes may drop, "
        "then it rises, and episodes get shorter. These are training states: judge by the evaluations above.",
        {"rollout/success_rate": "success rate"},
        {"rollout/episode_length": "env steps per episode"},
        from_zero=True,
    ),
    Panel(
        "Policy loss",
        "Its level follows the advantages (about -1 with --advantage absolute) and is no measure of progress. Jumps of "
        "orders of magnitude are a fault.",
        {"train/policy_loss": "policy loss"},
        {"train/value_loss": "value loss"},
    ),
    DRIFT,
    Panel(
        "Probability ratios",
        "The mean stays within about a tenth of 1. The largest single one says little: 5 to 120 in good runs of the "
        "small policy with --ratio-level token, below 3 with chunk.",
        {"train/ratio_mean": "mean", "train/ratio_max": "largest"},
        log_scale=True,
    ),
    Panel(
        "Ratio before the first step",
        "Mean distance from 1 before anything was learnt: rounding only. Below 1e-5 in float32, 0.01 in bfloat16; "
        "above 0.05 the run stops.",
        {"train/first_ratio_error": "|ratio - 1|"},
        log_scale=True,
    ),
    Panel(
        "Entropy",
        "Of the same order throughout, or falling slowly. Towards 0 within a few updates the policy stops exploring: "
        "raise --temperature or --entropy-coef. Rising on and on, it forgets what it could do.",
        {"train/entropy": "entropy (nats per token)"},
        {"train/teacher_kl": "KL to the teacher"},
        from_zero=True,
    ),
    Panel(
        "Gradients",
        "A norm of the same order throughout. Skipped steps and spikes stay at 0; if they do not, lower --lr.",
        {"train/grad_norm": "norm before clipping"},
        {"train/skipped_steps": "skipped steps", "train/gradient_spikes": "spikes"},
        from_zero=True,
    ),
    Panel(
        "Advantages",
        "The spread is what can be learnt from. When the share of non-zero advantages falls to 0 (all episodes alike) "
        "there is no signal: longer rollouts, other tasks, or --dynamic-sampling.",
        {
            "advantage/mean": "mean",
            "advantage/std": "standard deviation",
            "advantage/nonzero_fraction": "share not 0",
        },
    ),
    Panel(
        "Critic",
        "Explained variance above 0 and rising: the values predict the returns better than their mean.",
        {"train/explained_variance": "explained variance"},
    ),
    Panel(
        "Inside the rollout",
        "Seconds; sim, render and preprocess are summed over the simulators. Large infer: more simulators. "
        "Large wait: --num-envs one or two above the number of cores.",
        {f"time/{part}": part for part in ("sim", "render", "preprocess", "infer", "wait")},
        from_zero=True,
    ),
    Panel(
        "Speed",
        "Constant. A slow decline points at memory or at other work on the machine.",
        {"rollout/env_steps_per_s": "env steps per second"},
        {"system/gpu_mem_gb": "peak GPU memory (GiB)"},
        from_zero=True,
    ),
)
SUCCESS_READING = (
    "Held-out initial states, bars are 95 % Wilson intervals. Good: the sampled student ends above where it began by "
    "more than the bars, the greedy one does not lose, and by the end of the warmup both are near the teacher. Dots: "
    "training rollouts."
)
TIME_READING = "Seconds of wall time per update; evaluations and checkpoints are counted at the update before them."
WALL_PARTS = {
    "rollout/time_s": "rollout",
    "time/update": "update",
    "time/eval": "evaluation",
    "time/checkpoint": "checkpoint",
}


def draw_success(axis: plt.Axes, rows: Sequence[Row]) -> None:
    """Evaluated success rates with their intervals, and the training rollouts."""
    steps, rates = series(rows, "rollout/success_rate")
    axis.plot(steps, rates, ".", color=LIGHT["muted"], label="training rollouts")
    for key, (label, colour) in WAYS.items():
        steps, rates = series(rows, key)
        low, high = series(rows, f"{key}_low")[1], series(rows, f"{key}_high")[1]
        if not steps:
            continue
        errors = [[r - a for r, a in zip(rates, low, strict=True)], [b - r for r, b in zip(rates, high, strict=True)]]
        axis.errorbar(steps, rates, yerr=errors, marker="o", capsize=3, label=label, color=colour)
    axis.set_ylim(-0.03, 1.03)
    shade_phases(axis, rows)
    head(axis, "Success rate")


def draw_panel(axis: plt.Axes, panel: Panel, rows: Sequence[Row]) -> None:
    """The panel's metrics against env steps; one that was never recorded is left out."""
    drawn = _lines(axis, panel.left, rows, CYCLE)
    _limits(axis, panel, drawn)
    if any(series(rows, key)[0] for key in panel.right):
        right = axis.twinx()
        right.grid(False)
        right.tick_params(right=False)
        of_right = _lines(right, panel.right, rows, CYCLE[len(panel.left) :], "s--")
        _limits(right, panel, of_right)
        right.set_ylabel("dashed", fontsize=8)
        drawn += of_right
    if not drawn:
        axis.text(0.5, 0.5, "nothing recorded yet", ha="center", transform=axis.transAxes, color=LIGHT["muted"])
    shade_phases(axis, rows)
    head(axis, panel.title, drawn)


def draw_time(axis: plt.Axes, rows: Sequence[Row]) -> None:
    """Wall time of every update, stacked by what it was spent on."""
    spent: dict[int, dict[str, float]] = {}
    for row in rows:
        parts = spent.setdefault(row["update"], dict.fromkeys(WALL_PARTS, 0.0))
        for key in WALL_PARTS:
            parts[key] += row.get(key) or 0.0
    bottom = [0.0] * len(spent)
    for (key, label), colour in zip(WALL_PARTS.items(), CYCLE, strict=False):
        seconds = [parts[key] for parts in spent.values()]
        axis.bar(list(spent), seconds, bottom=bottom, label=label, color=colour, width=0.8)
        bottom = [a + b for a, b in zip(bottom, seconds, strict=True)]
    axis.set(xlabel="update", ylabel="seconds")
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    head(axis, "Time")


def shade_phases(axis: plt.Axes, rows: Sequence[Row]) -> None:
    """Colour the background by the phase of every update: warmup, transition, RL."""
    start = 0
    for row in rows:
        if "schedule/phase" in row:
            colour = PHASE_COLOURS[int(row["schedule/phase"])]
            axis.axvspan(start, row["global_step"], color=colour, zorder=0, linewidth=0)
            start = row["global_step"]
    axis.set_xlabel("env steps")
    axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))


def head(axis: plt.Axes, title: str, drawn: Sequence | None = None) -> None:
    """Title and legend above the axes, where no curve can run."""
    handles = axis.get_legend_handles_labels()[0] if drawn is None else drawn
    letters = sum(len(handle.get_label()) + 6 for handle in handles)
    rows = math.ceil(letters / (14 * axis.get_position().width * axis.figure.get_figwidth())) if handles else 0
    axis.set_title(title, loc="left", pad=6 + 13 * rows)
    if handles:
        columns = math.ceil(len(handles) / rows)
        place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.99), "borderaxespad": 0.1}
        axis.legend(handles=handles, ncols=columns, columnspacing=1.2, handlelength=1.4, handletextpad=0.5, **place)


def _limits(axis: plt.Axes, panel: Panel, drawn: Sequence) -> None:
    if panel.log_scale and any(value > 0 for line in drawn for value in line.get_ydata()):
        axis.set_yscale("log")
    if panel.from_zero and drawn:
        highest = max(max(line.get_ydata()) for line in drawn)
        axis.set_ylim(0, 1.08 * highest if highest > 0 else 1)


def _lines(
    axis: plt.Axes, metrics: Mapping[str, str], rows: Sequence[Row], colours: Sequence[str], style: str = "o-"
) -> list:
    drawn = []
    for (key, label), colour in zip(metrics.items(), colours, strict=False):
        steps, values = series(rows, key)
        if steps:
            drawn += axis.plot(steps, values, style, label=label, color=colour)
    return drawn
