"""The report page of a run, made from its folder: `python -m experiment.report RUN` writes report/index.html anew."""

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
from typing import Any, NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure

from configs.cli import main_guard, parse_flags
from configs.config import PhaseConfig
from contracts import BadInput, first_line, read_json, resolve_pointer
from experiment.metrics import Successes
from experiment.results import Paired, compare

log = logging.getLogger(__name__)

Row = Mapping[str, Any]  # of metrics.jsonl
TEACHER, GREEDY, SAMPLED = "eval/teacher_success", "eval/student_success", "eval/student_sampled_success"
WALL_TIME = ("rollout/time_s", "time/update", "time/eval", "time/checkpoint")
PHASE_COLOURS = ["#e8b04018", "#4090e018", "#40c06018"]  # warmup, transition, RL; red, green, blue, opacity
TEMPLATES = Path(__file__).parent / "templates"


class Panel(NamedTuple):
    """Metrics that are read together, metric -> label, and what good ones look like."""

    title: str
    reading: str
    metrics: Mapping[str, str]
    log_scale: bool = False


PANELS = [Panel(**panel) for panel in json.loads((TEMPLATES / "panels.json").read_text())]


def recorded(rows: Sequence[Row]) -> list[Panel]:
    return [
        panel for panel in PANELS if any(row.get(key) is not None for row in rows for key in panel.metrics)
    ]


@dataclass(frozen=True)
class StoredRun:
    folder: Path
    rows: Sequence[Row]
    phases: PhaseConfig
    provenance: dict[str, Any]  # argv, git, versions, machine (config.json)

    @property
    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if GREEDY in row]

    @property
    def best_evaluation(self) -> Row:
        """The one with the highest lower bound of the greedy student, the first of equals: as `checkpoints/best`."""
        return max(self.evaluations, key=lambda row: row[f"{GREEDY}_low"])

    def status(self) -> str:
        """How far the run has come, in one line."""
        is_finished = (
            bool(self.evaluations) and self.evaluations[-1]["global_step"] >= self.phases.total_steps
        )
        steps, updates = (
            self.rows[-1]["global_step"] if self.rows else 0,
            sum("schedule/phase" in r for r in self.rows),
        )
        done = "Finished" if is_finished else "Not finished"
        return f"{done}: {steps} env steps, {updates} updates, {hours_of(self.rows):.1f} h"


def read_run(folder: Path) -> StoredRun:
    """Read a run folder, finished or not. Raises BadInput."""
    try:
        stored = read_json(folder / "config.json")
        phases = PhaseConfig(**stored["config"]["phases"])
        return StoredRun(folder.resolve(), read_metrics(folder), phases, stored)
    except (BadInput, OSError, KeyError, TypeError) as problem:
        raise BadInput(f"{folder} is not a run folder: {first_line(problem)}") from None


def hours_of(rows: Sequence[Row]) -> float:
    return sum(row.get(key) or 0.0 for row in rows for key in WALL_TIME) / 3600


def training_of(checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint of a run has taken up to its step, and the run's config.json; None: it is no run's."""
    folder = resolve_pointer(checkpoint).resolve()
    number = folder.name.removeprefix("step_")
    if not (number.isdigit() and (folder.parents[1] / "metrics.jsonl").is_file()):
        return None
    run, step = read_run(folder.parents[1]), int(number)
    rows, stored = [row for row in run.rows if row["global_step"] <= step], run.provenance
    on_gpu = stored["machine"]["gpus"] and stored["config"]["model"]["device"] != "cpu"
    hours, num_gpus = hours_of(rows), stored.get("ranks", 1) if on_gpu else 0
    peak = max((row.get("system/gpu_mem_gb") or 0.0 for row in rows), default=0.0)
    taken = {"env_steps": step, "hours": hours, "gpu_hours": hours * num_gpus, "peak_gpu_gib": peak}
    return {"run": run.folder.name, **taken, **stored}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; a last line that a kill cut short is left out."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Change(NamedTuple):
    """A line of the table of results: two success rates and, on equal episodes, their difference."""

    label: str
    before: Successes
    after: Successes
    paired: Paired | None = None

    def __str__(self) -> str:
        paired = f"; on the same episodes {self.paired}" if self.paired else ""
        return f"{self.label}: {self.before} before, {self.after} after{paired}"


def changes(run: StoredRun) -> list[Change]:
    """Sampled and greedy student from the first to the last evaluation, the student against its teacher, each task."""
    if not run.evaluations:
        return []
    first, last = run.evaluations[0], run.evaluations[-1]

    def outcomes(row: Row, key: str) -> dict[tuple[int, int, int], bool]:
        path = run.folder / "evaluations" / f"step_{row['global_step']}.json"
        actor = key.removeprefix("eval/").removesuffix("_success")
        played = read_json(path).get(actor, ()) if path.exists() else ()
        return {(e["task_id"], e["init_state_id"], e["trial"]): e["success"] for e in played}

    whole, of_tasks = [], []
    for label, start, end in (
        ("student, sampled", SAMPLED, SAMPLED),
        ("student, greedy", GREEDY, GREEDY),
        ("teacher, then greedy student", TEACHER, GREEDY),
    ):
        if f"{start}_k" not in first:  # no sampled episodes were asked for
            continue
        before, after = (
            Successes(int(r[f"{k}_k"]), int(r[f"{k}_n"])) for r, k in ((first, start), (last, end))
        )
        earlier, later = outcomes(first, start), outcomes(last, end)
        paired = compare(earlier, later)
        whole.append(Change(label, before, after, paired if paired.n else None))
        tasks = sorted({task_id for task_id, _, _ in earlier.keys() & later.keys()}) if start == end else []
        for task_id in tasks if len(tasks) > 1 else ():
            paired = compare({key: success for key, success in earlier.items() if key[0] == task_id}, later)
            of_tasks.append(Change(f"task {task_id}, {label}", paired.before, paired.after, paired))
    return whole + of_tasks


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Env steps and values of a metric, where it was recorded."""
    present = [row for row in rows if row.get(key) is not None]
    return [row["global_step"] for row in present], [row[key] for row in present]


def draw_curves(rows: Sequence[Row]) -> Figure:
    """Every panel of PANELS that was recorded, against env steps, on the colours of the phases."""
    panels = recorded(rows)
    height = max(1, math.ceil(len(panels) / 3))
    figure = Figure(figsize=(15, 3.2 * height), layout="constrained")
    for number, panel in enumerate(panels):
        axis = figure.add_subplot(height, 3, number + 1, title=panel.title, xlabel="env steps")
        for key, label in panel.metrics.items():
            steps, values = series(rows, key)
            low, high = (series(rows, f"{key}_{end}")[1] for end in ("low", "high"))
            errors = [np.subtract(values, low), np.subtract(high, values)] if low else None
            axis.errorbar(steps, values, yerr=errors, label=label, marker="o", markersize=4, capsize=3)
            if panel.log_scale and max(values, default=0) > 0:
                axis.set_yscale("log")
        start = 0
        for step, phase in zip(*series(rows, "schedule/phase"), strict=True):
            axis.axvspan(start, step, color=PHASE_COLOURS[int(phase)], linewidth=0)
            start = step
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    return figure


def write_report(run: StoredRun) -> Path:
    """Write report/index.html and report/curves.png from the run's files; the path of the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    milestones = (run.evaluations[0], run.best_evaluation, run.evaluations[-1]) if run.evaluations else ()
    steps = dict.fromkeys(row["global_step"] for row in milestones)
    videos = [f"{actor}-step_{step}.mp4" for step in steps for actor in ("teacher", "student")]
    loader = FileSystemLoader(TEMPLATES)
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    text = templates.get_template("report.html").render(
        run=run,
        written=time.strftime("%Y-%m-%d %H:%M"),
        changes=changes(run),
        panels=recorded(run.rows),
        absent=[panel.title for panel in PANELS if panel not in recorded(run.rows)],
        has_first_frame=(run.folder / "first_frame.png").is_file(),
        videos=[video for video in videos if (run.folder / "videos" / video).is_file()],
        command=shlex.join(run.provenance["argv"]),
    )
    page = run.folder / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    draw_curves(run.rows).savefig(page.with_name("curves.png"), dpi=90)
    page.write_text(text)
    return page


def conclude(folder: Path) -> None:
    """The end of a run: its results in the log, the report in its folder."""
    try:
        stored = read_run(folder)
        for change in changes(stored)[:2]:
            log.info(change)
        log.info("report %s, videos %s", write_report(stored), folder / "videos")
    except Exception as error:
        again = f"python -m experiment.report {folder} tries again"
        log.warning("no report could be written (%s); %s", first_line(error), again)


@dataclass(frozen=True)
class ReportArgs:
    """What a run has reached, from its folder alone."""

    run: tyro.conf.Positional[Path]
    """Run folder."""


def main(argv: Sequence[str]) -> None:
    run = read_run(parse_flags(ReportArgs, argv, prog="python -m experiment.report").run)
    print(f"assets: {run.provenance['looks']}", *map(str, changes(run)[:2]), sep="\n")
    print(write_report(run))


if __name__ == "__main__":
    sys.exit(main_guard("experiment.report", main))
