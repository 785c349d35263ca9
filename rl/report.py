"""What a run has reached, from its folder alone: `python -m rl.report RUN [RUN ...]`

One run: writes RUN/report/index.html (and curves.png) anew and prints the table of results. Several: compares them, in
the terminal and in one page (--out).
"""

from __future__ import annotations

import base64
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from configs.cli import answer_at_once, main_guard, parse_flags


@dataclass(frozen=True)
class ReportArgs:
    """What a run has reached, from its folder alone; several runs are compared."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    out: Path = Path("comparison.html")
    """Page of a comparison (of one run: its report/index.html)."""


parse = partial(parse_flags, ReportArgs, prog="python -m rl.report")

if __name__ == "__main__":
    answer_at_once("rl.report", parse)  # before the seconds that the imports below take

import matplotlib.pyplot as plt
from rich.console import Console

from envs.tasks import check_task_ids, instruction_of, task_names
from errors import BadInput
from rl.comparison import write_comparison
from rl.never_fatal import never_fatal
from rl.page import Figure, figure, main_figure, write_page
from rl.panels import (
    DISTILLATION,
    DRIFT,
    PANELS,
    STYLE,
    SUCCESS_READING,
    TIME_READING,
    draw_panel,
    draw_success,
    draw_time,
)  # fmt: skip
from rl.progress import duration
from rl.run import Run
from rl.stored_run import (
    GREEDY,
    SAMPLED,
    StoredRun,
    changed_settings,
    changes,
    read_run,
    successes_of,
    task_changes,
)  # fmt: skip

log = logging.getLogger("train")
SHOWN_VERSIONS = ("python", "torch", "transformers", "peft", "mujoco", "robosuite", "numpy")
WALL_TIMES = ("rollout/time_s", "time/update", "time/eval", "time/checkpoint")


def conclude(run: Run) -> None:
    """The end of a run: its results in the log, the report in its folder, summary and tables in wandb."""
    with never_fatal("no report could be written", f"python -m rl.report {run.folder} tries again"):
        stored = read_run(run.folder)
        for line in before_and_after(stored):
            log.info(line)
        run.wandb.conclude(summary(stored), tables(stored))
        log.info("report %s, videos %s", write_report(stored), run.folder / "videos")


def write_report(run: StoredRun) -> Path:
    """Write report/index.html and report/curves.png from the run's files; the path of the page."""
    plot_curves(run)
    preset, settings = changed_settings(run)
    return write_page(
        run.folder / "report" / "index.html",
        "report.html",
        run=run,
        status=status(run),
        written=time.strftime("%Y-%m-%d %H:%M"),
        changes=changes(run) if run.evaluations else [],
        best=run.best_evaluation if run.evaluations else None,
        tasks=task_changes(run) if run.evaluations else {},
        instructions=instructions(run),
        figures=figures(run),
        missing=[panel.title for panel in PANELS if not panel.has_data(run.rows)],
        first_frame=embedded_png(run.folder / "first_frame.png"),
        videos=chosen_videos(run),
        command=f"python train_grpo.py {shlex.join(run.provenance['argv'])}",
        preset=preset,
        settings=settings,
        machine=machine(run),
    )


def status(run: StoredRun) -> str:
    """How far a run has come, in one line."""
    seconds = sum(row.get(key) or 0.0 for row in run.rows for key in WALL_TIMES)
    ending = "Finished" if run.is_finished else "Not finished"
    return f"{ending}: {run.global_step} env steps, {len(run.updates)} updates, {duration(seconds)}"


def figures(run: StoredRun) -> list[Figure]:
    drawn = main_figure(partial(draw_success, rows=run.rows), SUCCESS_READING)
    drawn += [
        figure(partial(draw_panel, panel=panel, rows=run.rows), panel.reading)
        for panel in PANELS
        if panel.has_data(run.rows)
    ]
    if run.updates:
        drawn.append(figure(partial(draw_time, rows=run.rows), TIME_READING))
    return drawn


def plot_curves(run: StoredRun) -> Path:
    """The four most important curves as one picture, report/curves.png."""
    with plt.rc_context(STYLE):
        drawn, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
        draw_success(axes[0, 0], run.rows)
        draw_panel(axes[0, 1], DISTILLATION, run.rows)
        draw_panel(axes[1, 0], DRIFT, run.rows)
        draw_time(axes[1, 1], run.rows)
        drawn.suptitle(run.name)
        path = run.folder / "report" / "curves.png"
        path.parent.mkdir(exist_ok=True)
        drawn.savefig(path, dpi=110)
        plt.close(drawn)
    return path


def before_and_after(run: StoredRun) -> list[str]:
    """What training has changed, from the first and the last evaluation: one line per way of acting."""
    lines = []
    for change in changes(run)[:2]:
        paired = f"; on the same episodes {change.paired}" if change.paired else ""
        lines.append(f"{change.label}: {change.before} before, {change.after} after{paired}")
    return lines


def instructions(run: StoredRun) -> dict[int, str]:
    """Instruction by task id; empty for a BDDL file of the user's and where LIBERO is not installed."""
    if run.settings["bddl_file"] is not None:
        return {}
    try:
        check_task_ids(run.settings["task_suite"], run.settings["task_ids"])
    except BadInput:
        return {}
    names = task_names(run.settings["task_suite"])
    return {task_id: instruction_of(names[task_id]) for task_id in run.settings["task_ids"]}


def embedded_png(path: Path) -> str | None:
    """A picture as a data URI; None when there is none."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" if path.is_file() else None


def chosen_videos(run: StoredRun) -> list[dict[str, str]]:
    """The first evaluation's teacher and student, the student of the best one and of the last, where they exist."""
    if not run.evaluations:
        return []
    first, best, last = (e["global_step"] for e in (run.evaluations[0], run.best_evaluation, run.evaluations[-1]))
    wanted = [("teacher", first, "Teacher"), ("student", first, "Student before training")]
    wanted += [("student", best, "Student, best evaluation")] if best not in (first, last) else []
    wanted += [("student", last, "Student, last evaluation")] if last != first else []
    return [
        {"source": f"../videos/{actor}-step_{step}.mp4", "caption": f"{caption} (env step {step})"}
        for actor, step, caption in wanted
        if (run.folder / "videos" / f"{actor}-step_{step}.mp4").is_file()
    ]


def machine(run: StoredRun) -> dict[str, str]:
    """Commit, versions and hardware, as config.json has them."""
    stored = run.provenance
    versions, hardware = stored["versions"], stored["machine"]
    git = stored["git"]
    modified = ", with local changes" if git.get("modified") else ""
    gpus = f"; {', '.join(hardware['gpus'])}" if hardware.get("gpus") else ""
    return {
        "commit": f"{git['commit'][:12]}{modified}" if git else "not a git checkout",
        "versions": ", ".join(f"{name} {versions[name]}" for name in SHOWN_VERSIONS if name in versions),
        "machine": f"{hardware['cpus']} CPUs, {hardware['processor']}{gpus}; {hardware['system']}",
    }


def summary(run: StoredRun) -> dict[str, float]:
    """What a row of wandb's table of runs shows."""
    found: dict[str, float] = {"result/best_step": run.best_evaluation["global_step"]}
    for name, change in zip(("sampled", "greedy"), changes(run), strict=False):
        found |= {f"result/{name}_before": change.before.rate, f"result/{name}_after": change.after.rate}
        if change.paired:
            found |= {
                f"result/{name}_change": change.paired.difference,
                f"result/{name}_p_value": change.paired.p_value,
            }
    return found


def tables(run: StoredRun) -> dict[str, list[dict[str, Any]]]:
    """Evaluations (with the videos of the first, the best and the last) and tasks, as records."""
    shown = {video["source"].split("/")[-1] for video in chosen_videos(run)}
    evaluations = []
    for row in run.evaluations:
        name = f"student-step_{row['global_step']}.mp4"
        evaluations.append(
            {
                "global_step": row["global_step"],
                "sampled": str(successes_of(row, SAMPLED)),
                "greedy": str(successes_of(row, GREEDY)),
                "video": run.folder / "videos" / name if name in shown else None,
            }
        )
    names = instructions(run)
    tasks = [
        {"task": task_id, "instruction": names.get(task_id, "")}
        | {f"{c.label} {when}": str(s) for c in both for when, s in (("before", c.before), ("after", c.after))}
        for task_id, both in task_changes(run).items()
    ]
    return {"tables/evaluations": evaluations, "tables/tasks": tasks}


def main(argv: Sequence[str]) -> None:
    arguments = parse(argv)
    if not arguments.runs:
        raise BadInput("name at least one run folder")
    runs = [read_run(folder) for folder in arguments.runs]
    if len(runs) > 1:
        Console().print(write_comparison(runs, arguments.out))
        print(arguments.out)
        return
    print("\n".join(before_and_after(runs[0])) if runs[0].evaluations else "no evaluation has been recorded yet")
    print(write_report(runs[0]))


if __name__ == "__main__":
    sys.exit(main_guard("rl.report", main))
