"""Write the report page of a run from its folder: `python -m experiment.report RUN` writes report/index.html."""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from command_line import main_guard, parse_flags
from contracts import BadInput, first_line
from experiment.run_folder import CONFIG_FILE, MetricsRow
from experiment.stored_run import StoredRun, changes, read_run

log = logging.getLogger(__name__)

COLUMNS = 3  # panels in each row of the figure
PHASE_COLOURS = ("#e8b04018", "#4090e018", "#40c06018")  # warmup, transition, RL; as #RRGGBBAA
TEMPLATES = Path(__file__).parent / "templates"


class Panel(NamedTuple):
    """Metrics that are drawn in one plot."""

    title: str
    reading: str  # text of the page: what good curves look like
    metrics: Mapping[str, str]  # metric -> label
    log_scale: bool = False


PANELS = [Panel(**panel) for panel in json.loads((TEMPLATES / "panels.json").read_text())]


def recorded_panels(rows: Sequence[MetricsRow]) -> list[Panel]:
    """The panels with at least one recorded metric."""
    recorded = {metric for row in rows for metric in row}
    return [panel for panel in PANELS if not recorded.isdisjoint(panel.metrics)]


def series(rows: Sequence[MetricsRow], metric: str) -> tuple[list[float], list[float]]:
    """Env steps and values of a metric, from the rows that have it."""
    recorded = [row for row in rows if metric in row]
    return [row["global_step"] for row in recorded], [row[metric] for row in recorded]


def draw_curves(rows: Sequence[MetricsRow]) -> Figure:
    """Draw every recorded panel against env steps. Background colours show the phases."""
    panels = recorded_panels(rows)
    num_rows = max(1, math.ceil(len(panels) / COLUMNS))
    figure = Figure(figsize=(5 * COLUMNS, 3.2 * num_rows), layout="constrained")
    for position, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, COLUMNS, position, title=panel.title, xlabel="env steps")
        _draw_panel(axes, panel, rows)
        _shade_phases(axes, rows)
    return figure


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[MetricsRow]) -> None:
    for metric, label in panel.metrics.items():
        steps, values = series(rows, metric)
        _, low = series(rows, f"{metric}_low")
        _, high = series(rows, f"{metric}_high")
        errors = None
        if len(low) == len(high) == len(values) > 0:
            errors = np.maximum([np.subtract(values, low), np.subtract(high, values)], 0)
        axes.errorbar(steps, values, yerr=errors, label=label, marker="o", markersize=4, capsize=3)
        if panel.log_scale and max(values, default=0) > 0:
            axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _shade_phases(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    start = 0.0
    for step, phase in zip(*series(rows, "schedule/phase"), strict=True):
        axes.axvspan(start, step, color=PHASE_COLOURS[int(phase) % len(PHASE_COLOURS)], linewidth=0)
        start = step


def write_report(run: StoredRun) -> Path:
    """Write report/index.html and report/curves.png from the run's files; returns the path of the page."""
    page = run.folder / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    draw_curves(run.rows).savefig(page.with_name("curves.png"), dpi=90)
    panels = recorded_panels(run.rows)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    try:
        text = environment.get_template("report.html").render(
            run=run,
            written=time.strftime("%Y-%m-%d %H:%M"),
            changes=changes(run),
            panels=panels,
            absent=[panel.title for panel in PANELS if panel not in panels],
            has_first_frame=(run.folder / "first_frame.png").is_file(),
            videos=_videos(run),
            command=shlex.join(run.description["argv"]),
        )
    except UndefinedError as error:  # the template reads fields that other versions may not have written
        raise BadInput(f"{run.folder / CONFIG_FILE}: a field of the report is missing ({error})") from None
    page.write_text(text)
    return page


def _videos(run: StoredRun) -> list[str]:
    """File names of the videos of the first, the best and the last evaluation, as far as they exist."""
    if not run.evaluations:
        return []
    evaluations = (run.evaluations[0], run.best_evaluation, run.evaluations[-1])
    steps = dict.fromkeys(row["global_step"] for row in evaluations)
    names = [f"{actor}-step_{step}.mp4" for step in steps for actor in ("teacher", "student")]
    return [name for name in names if (run.folder / "videos" / name).is_file()]


def conclude(folder: Path) -> None:
    """At the end of a run, log its results and write its report. A failure is logged and does not stop the program."""
    try:
        run = read_run(folder)
        for change in changes(run)[:2]:
            log.info(change)
        log.info("report %s, videos %s", write_report(run), folder / "videos")
    except Exception as error:
        command = f"python -m experiment.report {folder}"
        log.warning("the report could not be written (%s); to try again, run: %s", first_line(error), command)


@dataclass(frozen=True)
class ReportArgs:
    """Write the report page of a run, from its folder alone, and print its results."""

    run: tyro.conf.Positional[Path]
    """Run folder."""


def main(argv: Sequence[str]) -> None:
    """Print the results of a run and the path of its report page. Raises BadInput."""
    run = read_run(parse_flags(ReportArgs, argv, prog="python -m experiment.report").run)
    print(f"assets: {run.description['looks']}")
    for change in changes(run)[:2]:
        print(change)
    print(write_report(run))


if __name__ == "__main__":
    sys.exit(main_guard("experiment.report", main))
