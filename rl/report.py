"""What a run has reached, from its folder alone: `python -m rl.report RUN [RUN ...]`

One run: writes RUN/report/index.html (and curves.png) anew and prints what has changed. Several: compares them, in the
terminal and in one page (--out).
"""

from __future__ import annotations

import base64
import json
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from configs.cli import main_guard, parse_flags, parse_train
from configs.config import PhaseConfig, to_dict
from configs.presets import PRESETS
from contracts import BadInput, first_line, read_json
from envs.tasks import instruction_of, task_names
from rl import curves
from rl.curves import GREEDY, SAMPLED, TEACHER, Row, series
from rl.phases import last_step
from rl.results import Paired, Successes, aligned, count_pairs

log = logging.getLogger("train")

NOT_COMPARED = {"name", "output", "keep_checkpoints", "wandb_mode", "wandb_project"}
COMPARED = (
    SAMPLED, GREEDY, "rollout/success_rate", "rollout/episode_length", "distill/loss", "train/approx_kl",
    "train/clip_fraction", "train/entropy", "train/grad_norm", "rollout/env_steps_per_s",
)  # fmt: skip


@dataclass(frozen=True)
class StoredRun:
    """`settings` and `provenance` are as the run stored them: a field that came later is missing."""

    folder: Path
    rows: Sequence[Row]
    settings: dict[str, Any]  # field name -> value, all sections together
    provenance: dict[str, Any]  # argv, git, versions, machine

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def global_step(self) -> int:
        """Env steps of training so far."""
        return self.rows[-1]["global_step"] if self.rows else 0

    @property
    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if GREEDY in row]

    @property
    def best_evaluation(self) -> Row:
        """The one with the highest lower bound of the greedy student, the first of equals: as `checkpoints/best`."""
        return max(self.evaluations, key=lambda row: row[f"{GREEDY}_low"])

    def status(self) -> str:
        """How far the run has come, in one line."""
        phases = PhaseConfig(**{k: self.settings[k] for k in ("warmup", "warmup_only", "warmup_steps", "total_steps")})
        is_finished = bool(self.evaluations) and self.evaluations[-1]["global_step"] >= last_step(phases)
        hours = sum(row.get(key) or 0.0 for row in self.rows for key in curves.WALL_PARTS) / 3600
        updates = sum("schedule/phase" in row for row in self.rows)
        ending = "Finished" if is_finished else "Not finished"
        return f"{ending}: {self.global_step} env steps, {updates} updates, {hours:.1f} h"


def read_run(folder: Path) -> StoredRun:
    """Read a run folder, finished or not. Raises BadInput."""
    try:
        stored = read_json(folder / "config.json")
        settings = {name: value for section in stored.pop("config").values() for name, value in section.items()}
        return StoredRun(folder.resolve(), read_metrics(folder), settings, stored)
    except (BadInput, KeyError, AttributeError) as problem:
        raise BadInput(f"{folder} is not a run folder: {first_line(problem)}") from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; a last line that a kill cut short is left out. Raises BadInput."""
    rows = []
    try:
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            rows.append(json.loads(line))
    except OSError as error:
        raise BadInput(f"{folder / 'metrics.jsonl'}: cannot be read ({error.strerror or error})") from None
    except ValueError:
        pass
    return rows


def successes_of(row: Row, key: str) -> Successes:
    """The counts of an evaluated success rate; per task they follow from the total, all tasks play equally often."""
    if f"{key}_k" in row:
        return Successes(int(row[f"{key}_k"]), int(row[f"{key}_n"]))
    total, _, _ = key.partition("_task_")
    played = int(row[f"{total}_n"]) // sum(name.startswith(f"{total}_task_") for name in row)
    return Successes(round(row[key] * played), played)


class Change(NamedTuple):
    """A line of the table of results: two success rates and, on equal episodes, their difference."""

    label: str
    before: Successes
    after: Successes
    paired: Paired | None = None


def changes(run: StoredRun) -> list[Change]:
    """Sampled and greedy student from the first to the last evaluation, and the student against its teacher.

    Raises BadInput when the run has no evaluation yet.
    """
    if not run.evaluations:
        raise BadInput(f"{run.folder}: no evaluation has been recorded yet")
    first, last = run.evaluations[0], run.evaluations[-1]

    def outcomes(row: Row, actor: str) -> dict[tuple, bool]:
        path = run.folder / "evaluations" / f"step_{row['global_step']}.json"
        played = read_json(path).get(actor, ()) if path.exists() else ()
        return {(e["task_id"], e["init_state_id"], e["trial"]): e["success"] for e in played}

    def change(label: str, before: str, after: str, actor_before: str, actor_after: str) -> Change:
        earlier, later = outcomes(first, actor_before), outcomes(last, actor_after)
        paired = count_pairs((earlier[key], later[key]) for key in earlier.keys() & later.keys())
        return Change(label, successes_of(first, before), successes_of(last, after), paired if paired.n else None)

    return [
        change("student, sampled", SAMPLED, SAMPLED, "student_sampled", "student_sampled"),
        change("student, greedy", GREEDY, GREEDY, "student", "student"),
        change("teacher, then greedy student", TEACHER, GREEDY, "teacher", "student"),
    ]


def task_changes(run: StoredRun) -> dict[int, list[Change]]:
    """Of a run over several tasks: what became of the sampled and the greedy student on each."""
    first, last = run.evaluations[0], run.evaluations[-1]
    return {
        task_id: [
            Change(label, successes_of(first, f"{key}_task_{task_id}"), successes_of(last, f"{key}_task_{task_id}"))
            for label, key in (("sampled", SAMPLED), ("greedy", GREEDY))
        ]
        for task_id in run.settings["task_ids"]
        if f"{GREEDY}_task_{task_id}" in first and f"{GREEDY}_task_{task_id}" in last
    }


def changed_settings(run: StoredRun) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The preset that a run started from, and the fields in which it differs: name -> (preset, run)."""
    try:
        preset = parse_train(run.provenance["argv"]).preset
    except BadInput:  # flags of another version
        return "unknown", {}
    sections = json.loads(json.dumps(to_dict(PRESETS[preset]))).values()  # tuples are lists in JSON
    of_preset = {name: value for section in sections for name, value in section.items()}
    common = of_preset.keys() & run.settings.keys()
    return preset, {n: (of_preset[n], v) for n, v in run.settings.items() if n in common and v != of_preset[n]}


def write_page(path: Path, template: str, **content: Any) -> Path:
    """Fill a template of rl/templates. Raises BadInput when the page cannot be written."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(curves.TEMPLATES),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(environment.get_template(template).render(**content))
    except OSError as error:
        raise BadInput(f"{path}: the page cannot be written there ({error.strerror or error})") from None
    return path


def write_report(run: StoredRun) -> Path:
    """Write report/index.html and report/curves.png from the run's files; the path of the page."""
    shown = [panel for panel in curves.PANELS.values() if panel.has_data(run.rows)]
    figures = [(curves.svg(partial(curves.draw_success, rows=run.rows), wide=True), curves.SUCCESS_READING)]
    figures += [(curves.svg(partial(curves.draw_panel, rows=run.rows, panel=panel)), panel.reading) for panel in shown]
    figures += [(curves.svg(partial(curves.draw_time, rows=run.rows)), curves.TIME_READING)] if run.rows else []
    picture = run.folder / "first_frame.png"
    preset, settings = changed_settings(run)
    page = write_page(
        run.folder / "report" / "index.html",
        "report.html",
        run=run,
        status=run.status(),
        written=time.strftime("%Y-%m-%d %H:%M"),
        changes=changes(run) if run.evaluations else [],
        best=run.best_evaluation if run.evaluations else None,
        tasks=task_changes(run) if run.evaluations else {},
        figures=figures,
        missing=[panel.title for panel in curves.PANELS.values() if panel not in shown],
        first_frame=base64.b64encode(picture.read_bytes()).decode() if picture.is_file() else None,
        videos=videos(run),
        command=shlex.join(run.provenance["argv"]),
        instructions=instructions(run),
        preset=preset,
        settings=settings,
    )
    curves.plot_curves(run.rows, run.name, page.with_name("curves.png"))
    return page


def videos(run: StoredRun) -> list[tuple[str, str]]:
    """File and caption: the first evaluation's teacher and student, the student of the best one and of the last."""
    if not run.evaluations:
        return []
    first, best, last = (e["global_step"] for e in (run.evaluations[0], run.best_evaluation, run.evaluations[-1]))
    wanted = {f"teacher-step_{first}.mp4": "Teacher", f"student-step_{first}.mp4": "Student before training"}
    for step, which in ((best, "best"), (last, "last")):
        wanted.setdefault(f"student-step_{step}.mp4", f"Student, {which} evaluation (env step {step})")
    return [(name, caption) for name, caption in wanted.items() if (run.folder / "videos" / name).is_file()]


def instructions(run: StoredRun) -> dict[int, str]:
    """Instruction by task id; empty for a BDDL file of the user's and where LIBERO is not installed."""
    try:
        names = task_names(run.settings["task_suite"]) if run.settings["bddl_file"] is None else ()
    except BadInput:
        names = ()
    return {task_id: instruction_of(name) for task_id, name in enumerate(names)}


def write_comparison(runs: Sequence[StoredRun], page: Path) -> list[list[str]]:
    """Write the page; returns its table, runs as columns. Raises BadInput for a run without evaluation."""
    results = [changes(run)[:2] for run in runs]  # sampled, greedy
    table = [["", *(run.name for run in runs)], ["env steps", *(str(run.global_step) for run in runs)]]
    for number, label in enumerate(("sampled", "greedy")):
        table.append([f"{label}, first", *(str(of_run[number].before) for of_run in results)])
        table.append([f"{label}, last", *(str(of_run[number].after) for of_run in results)])
    for name in dict.fromkeys(name for run in runs for name in run.settings if name not in NOT_COMPARED):
        values = [run.settings.get(name) for run in runs]
        if any(value != values[0] for value in values):
            table.append([name, *map(str, values)])
    named = {run.name: run.rows for run in runs}
    figures = [
        curves.svg(partial(curves.draw_overlaid, runs=named, key=key), wide=key == SAMPLED)
        for key in COMPARED
        if any(series(run.rows, key)[0] for run in runs)
    ]
    write_page(page, "comparison.html", table=table, figures=figures)
    return table


def before_and_after(run: StoredRun) -> list[str]:
    """What training has changed, from the first and the last evaluation: one line per way of acting."""
    lines = []
    for change in changes(run)[:2]:
        paired = f"; on the same episodes {change.paired}" if change.paired else ""
        lines.append(f"{change.label}: {change.before} before, {change.after} after{paired}")
    return lines


def conclude(run: Any) -> None:
    """The end of a run (rl.run.Run): its results in the log, the report in its folder, the summary in wandb."""
    try:
        stored = read_run(run.folder)
        for line in before_and_after(stored):
            log.info(line)
        summary = {"result/best_step": stored.best_evaluation["global_step"]}
        for change in changes(stored)[:2]:
            name = f"result/{change.label.removeprefix('student, ')}"
            summary |= {f"{name}_before": change.before.rate, f"{name}_after": change.after.rate}
            summary |= {f"{name}_p_value": change.paired.p_value} if change.paired else {}
        run.wandb.conclude(summary)
        log.info("report %s, videos %s", write_report(stored), run.folder / "videos")
    except Exception as error:
        log.warning(
            "no report could be written (%s); python -m rl.report %s tries again", first_line(error), run.folder
        )


@dataclass(frozen=True)
class ReportArgs:
    """What a run has reached, from its folder alone; several runs are compared."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    out: Path = Path("comparison.html")
    """Page of a comparison (of one run: its report/index.html)."""


def main(argv: Sequence[str]) -> None:
    arguments = parse_flags(ReportArgs, argv, prog="python -m rl.report")
    if not arguments.runs:
        raise BadInput("name at least one run folder")
    runs = [read_run(folder) for folder in arguments.runs]
    if len(runs) == 1:
        print("\n".join(before_and_after(runs[0])) if runs[0].evaluations else "no evaluation has been recorded yet")
        print(write_report(runs[0]))
        return
    print("\n".join(aligned(write_comparison(runs, arguments.out))))
    print(arguments.out)


if __name__ == "__main__":
    sys.exit(main_guard("rl.report", main))
