"""Draw success against env steps of one experiment: greedy and sampled, every seed a thin line, the teacher dashed.

    python -m benchmarks.plot docs/results/NAME.json docs/images/NAME.svg [--title TEXT]

The file is one of benchmarks.collect. Circles: evaluations on held-out states. If the file has results of a run's start
and of its end, which are of more states, only these are drawn. The blue line: training episodes in which the student
acts alone, the mean of the last 100 or so. The picture has a background of its own, so it can be read on dark pages,
and letters large enough for a width of 400 pixels. Prints its size.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.collect import (
    CollectedResults,
    CollectedRun,
    Experiment,
    Successes,
    Updates,
    read_experiment,
    share,
)
from command_line import main_guard, parse_flags

GREEDY_COLOUR = "#d95f02"
SAMPLED_COLOUR = "#1f78b4"
TEACHER_COLOUR = "#666666"
WINDOW = 100  # training episodes over which success is averaged


@dataclass(frozen=True)
class Args:
    # File of benchmarks.collect.
    experiment: tyro.conf.Positional[Path]
    # Picture to write, .svg or .png.
    out: tyro.conf.Positional[Path]
    # Line above the legend.
    title: str = ""


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.plot", description=__doc__)
    experiment = read_experiment(args.experiment)
    matplotlib.rcParams.update({"font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "vla-grpo"})
    figure = Figure(figsize=(5, 3.2), layout="constrained", facecolor="white")
    draw(figure.add_subplot(), experiment, args.title)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=160, metadata={"Date": None} if args.out.suffix == ".svg" else None)
    print(f"wrote {args.out}, {args.out.stat().st_size / 1e3:.1f} kB")


def draw(axes: Axes, experiment: Experiment, title: str) -> None:
    for run in experiment["runs"]:
        draw_run(axes, run, evaluations_to_draw(run, experiment["results"]))
    axes.plot([], [], color=SAMPLED_COLOUR, marker="o", markersize=4, label="sampled")
    axes.plot([], [], color=GREEDY_COLOUR, marker="o", markersize=4, label="greedy")
    first_run = evaluations_to_draw(experiment["runs"][0], experiment["results"])
    teachers = [100 * share(each["teacher"]) for _, each in first_run if "teacher" in each]
    if teachers:
        axes.axhline(teachers[0], color=TEACHER_COLOUR, linestyle="--", linewidth=1.2, label="teacher")
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    axes.set_xlabel("env steps")
    axes.set_ylabel("success, %")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), title=title or None)


def evaluations_to_draw(
    run: CollectedRun, results: Sequence[CollectedResults]
) -> list[tuple[int, Successes]]:
    """Env steps and successes of a run's results of start and end, or else of its own evaluations."""
    last_step = run["updates"]["global_step"][-1]
    starts = [(0, each["successes"]) for each in results if each["seed"] is None]
    ends = [(last_step, each["successes"]) for each in results if each["seed"] == run["seed"]]
    if starts and ends:
        return starts + ends
    return [(each["global_step"], each["successes"]) for each in run["evaluations"]]


def draw_run(axes: Axes, run: CollectedRun, evaluations: Sequence[tuple[int, Successes]]) -> None:
    env_steps, success = training_curve(run["updates"])
    axes.plot(env_steps, success, color=SAMPLED_COLOUR, linewidth=0.8, alpha=0.7)
    for mode, colour in (("sample", SAMPLED_COLOUR), ("greedy", GREEDY_COLOUR)):
        played = [(step, 100 * share(each[mode])) for step, each in evaluations if mode in each]
        style = "o" if mode == "sample" else "o-"
        axes.plot(
            [step for step, _ in played],
            [percent for _, percent in played],
            style,
            color=colour,
            linewidth=0.8,
            markersize=3.5,
        )


def training_curve(updates: Updates) -> tuple[np.ndarray, np.ndarray]:
    """Env steps and per cent of the training episodes of updates in which the student alone acted."""
    alone = np.array(updates["rollout/teacher_fraction"]) == 0
    env_steps = np.array(updates["global_step"])[alone]
    episodes = np.array(updates["rollout/trajectories"])[alone]
    successes = episodes * np.array(updates["rollout/success_rate"])[alone]
    if not alone.any():
        return env_steps, successes
    width = max(1, round(WINDOW / episodes.mean()))
    window = np.ones(width)
    successes_in_window = np.convolve(successes, window)[: len(episodes)]
    episodes_in_window = np.convolve(episodes, window)[: len(episodes)]
    return env_steps, 100 * successes_in_window / episodes_in_window


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.plot", main))
