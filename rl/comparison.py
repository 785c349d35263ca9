"""Several runs side by side: a table of results and of the settings that differ, and their curves in common axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from rich.table import Table

from rl.page import figure, main_figure, write_page
from rl.panels import CYCLE
from rl.stored_run import GREEDY, SAMPLED, Change, StoredRun, changes, series, settings_that_differ

MARKERS = "os^Dv"
INTERVALS = "Held-out initial states; the bands are 95 % Wilson intervals."
SAME = "Equal settings, other seeds: the spread between such runs is what chance does."
CURVES = {  # metric -> title, how to read it
    SAMPLED: ("Success, student sampled", f"{INTERVALS} {SAME}"),
    GREEDY: ("Success, student greedy", INTERVALS),
    "rollout/success_rate": ("Success in training rollouts", "The teacher's in the warmup, then the student's."),
    "rollout/episode_length": ("Env steps per episode", "Shorter as a policy gets better."),
    "distill/loss": ("Distillation loss (nats)", "Lower is nearer to the teacher, at equal distillation settings."),
    "train/approx_kl": (
        "Approximate KL within an update",
        "How far an update moves the policy: 0.02 to 0.06 in good runs of the small one.",
    ),
    "train/clip_fraction": (
        "Clip fraction",
        "Rises with --lr and --n-epochs; near 0.1 in good runs of the small policy.",
    ),
    "train/entropy": ("Entropy (nats per token)", "A run whose entropy goes to 0 has stopped exploring."),
    "train/grad_norm": ("Gradient norm before clipping", "Of one order throughout."),
    "rollout/env_steps_per_s": ("Env steps per second", "Of rollouts; comparable on one machine only."),
}


def write_comparison(runs: Sequence[StoredRun], page: Path) -> Table:
    """Write the page; returns the table for the terminal. Raises BadInput for a run without evaluation."""
    results = [changes(run)[:2] for run in runs]  # sampled, greedy
    differing = settings_that_differ(runs)
    drawn = main_figure(partial(draw_overlaid, runs=runs, key=SAMPLED), CURVES[SAMPLED][1])
    drawn += [
        figure(partial(draw_overlaid, runs=runs, key=key), reading)
        for key, (_, reading) in CURVES.items()
        if key != SAMPLED and any(series(run.rows, key)[0] for run in runs)
    ]
    write_page(page, "comparison.html", runs=runs, results=results, differing=differing, figures=drawn)
    return terminal_table(runs, results, differing)


def draw_overlaid(axis: plt.Axes, runs: Sequence[StoredRun], key: str) -> None:
    """One metric of every run against env steps, evaluated rates with their intervals."""
    for number, run in enumerate(runs):
        colour, marker = CYCLE[number % len(CYCLE)], MARKERS[number // len(CYCLE) % len(MARKERS)]
        steps, values = series(run.rows, key)
        low, high = series(run.rows, f"{key}_low")[1], series(run.rows, f"{key}_high")[1]
        axis.plot(steps, values, marker + "-", color=colour, label=run.name)
        if low:
            axis.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    if "success" in key:
        axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel("env steps")
    axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axis.set_title(CURVES[key][0], loc="left")
    if key == SAMPLED:
        axis.legend(loc="lower right")


def terminal_table(
    runs: Sequence[StoredRun], results: Sequence[Sequence[Change]], differing: dict[str, list[Any]]
) -> Table:
    """Runs as columns: names and values of settings are long, and there are few runs."""
    table = Table("", *(run.name for run in runs))
    table.add_row("env steps", *(str(run.global_step) for run in runs))
    for number, label in enumerate(("sampled", "greedy")):
        table.add_row(f"{label}, first", *(str(of_run[number].before) for of_run in results))
        table.add_row(f"{label}, last", *(str(of_run[number].after) for of_run in results))
    table.add_section()
    for name, values in differing.items():
        table.add_row(name, *(str(value) for value in values))
    return table
