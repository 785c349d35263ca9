"""Write the report page of a run from its folder: `python -m experiment.report RUN` writes report/index.html.

The page is one file: charts, first frame and videos are inside. It needs no network and no program but a browser.
"""

import base64
import json
import logging
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro
from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError

from command_line import main_guard, parse_flags
from contracts import BadInput, first_line, replaced
from experiment.charts import Chart, draw_chart
from experiment.run_files import (
    CONFIG_FILE,
    LOG_FILE,
    METRICS_FILE,
    MetricsRow,
    Outcome,
    outcomes_path,
    read_outcomes,
)
from experiment.statistics import Successes
from experiment.stored_run import (
    GREEDY,
    SAMPLED,
    TEACHER,
    StoredRun,
    changes,
    read_run,
    trained_changes,
)
from experiment.verdict import judge
from experiment.videos import FRAMES_PER_SECOND

log = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parent / "templates"
ACTORS = {GREEDY: "student, greedy", SAMPLED: "student, sampled", TEACHER: "teacher"}


class Panel(NamedTuple):
    """Metrics that are drawn in one chart."""

    section: str
    title: str
    reading: str  # HTML of the page: what good curves look like
    metrics: Mapping[str, str]  # metric -> label
    is_rate: bool = False


PANELS = [Panel(**panel) for panel in json.loads((TEMPLATES / "panels.json").read_text())]


def make_cards(rows: Sequence[MetricsRow]) -> dict[str, list[tuple[Panel, Chart]]]:
    """The panels of which something was recorded, each with its chart, by section."""
    sections: dict[str, list[tuple[Panel, Chart]]] = {}
    for panel in PANELS:
        chart = draw_chart(rows, panel.metrics, panel.is_rate)
        if chart.curves:
            sections.setdefault(panel.section, []).append((panel, chart))
    return sections


class Evaluation(NamedTuple):
    """A row of the table of evaluations."""

    env_steps: int
    student: Mapping[str, Successes]  # by how it acted, as ACTORS names it
    has_outcomes: bool  # whether the outcome of every episode was kept


class Video(NamedTuple):
    caption: str
    file: Path


def write_report(run: StoredRun) -> Path:
    """Write report/index.html from the run's files; returns its path."""
    page = run.folder / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    environment.filters["data_uri"] = _data_uri
    success = draw_chart(run.rows, ACTORS, is_rate=True)
    try:
        text = environment.get_template("report.html").render(
            run=run,
            written=time.strftime("%Y-%m-%d %H:%M"),
            verdict=judge(run),
            trained=trained_changes(run),
            changes=changes(run),
            success=success,
            phases=list(dict.fromkeys(span.phase for span in success.spans)),
            sections=make_cards(run.rows),
            evaluations=_evaluations(run),
            first_frame=run.folder / "first_frame.png",
            videos=_videos(run),
            commands=[
                shlex.join(["python", "train_grpo.py", *argv])
                for argv in (run.description["argv"], *run.description.get("resume_argv", []))
            ],
            files=[name for name in (CONFIG_FILE, METRICS_FILE, LOG_FILE) if (run.folder / name).is_file()],
        )
    except UndefinedError as error:  # the template reads fields that other versions may not have written
        raise BadInput(f"{run.folder / CONFIG_FILE}: a field of the report is missing ({error})") from None
    with replaced(page) as draft:
        draft.write_text(text, encoding="utf-8")  # as the page says
    return page


def _evaluations(run: StoredRun) -> list[Evaluation]:
    table = []
    for row in run.evaluations:
        env_steps = int(row["global_step"])
        actors = [metric for metric in (GREEDY, SAMPLED) if metric in row]
        student = {ACTORS[metric]: run.successes_in(row, metric) for metric in actors}
        table.append(Evaluation(env_steps, student, outcomes_path(run.folder, env_steps).is_file()))
    return table


def _videos(run: StoredRun) -> list[Video]:
    """The videos of the first, the best and the last evaluation, as far as they exist, each of them once."""
    if not run.evaluations:
        return []
    evaluations = (run.evaluations[0], run.best_evaluation, run.evaluations[-1])
    videos: dict[bytes, Video] = {}  # a student that is still its teacher has the teacher's video
    for env_steps in sorted({int(row["global_step"]) for row in evaluations}):
        outcomes = read_outcomes(run.folder, env_steps)
        when = f"after {env_steps:,} env steps" if env_steps else "before training"
        for actor in ("student", "teacher"):
            file = run.folder / "videos" / f"{actor}-step_{env_steps}.mp4"
            if file.is_file():
                name = "frozen teacher" if actor == "teacher" else f"student {when}"
                caption = f"{name}: {_ending(outcomes.get(actor, []))}"
                videos.setdefault(file.read_bytes(), Video(caption, file))
    return list(videos.values())


def _ending(outcomes: Sequence[Outcome]) -> str:
    """How the filmed episode ended, which is the first one of an evaluation."""
    if not outcomes:
        return "its outcome was not kept"
    filmed = outcomes[0]
    ending = "success" if filmed.success else "failure"
    seconds = filmed.env_steps / FRAMES_PER_SECOND
    place = f"task {filmed.task_id}, initial state {filmed.init_state_id}"
    return f"{ending} after {filmed.env_steps} env steps ({seconds:.1f} s); {place}"


def _data_uri(file: Path) -> str:
    """The contents of a picture or video as the value of a `src` attribute."""
    kind = {".png": "image/png", ".mp4": "video/mp4"}[file.suffix]
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def update_report(folder: Path) -> None:
    """Write the report of a run that goes on. A failure is logged and does not stop the program."""
    try:
        write_report(read_run(folder))
    except Exception as error:
        command = f"python -m experiment.report {folder}"
        log.warning("the report could not be written (%s); to try again, run: %s", first_line(error), command)


def _results(run: StoredRun) -> list[str]:
    """The verdict, and the change of the student over all tasks: sampled if that was played, and greedy."""
    students = (ACTORS[SAMPLED], ACTORS[GREEDY])
    return [judge(run).sentence, *(str(change) for change in changes(run) if change.label in students)]


def conclude(folder: Path) -> None:
    """At the end of a run, log its results, as far as they can be read, and where its report is."""
    try:
        for line in _results(read_run(folder)):
            log.info(line)
    except BadInput as problem:
        log.warning(problem)
    log.info("report %s, videos %s", folder / "report" / "index.html", folder / "videos")


@dataclass(frozen=True)
class ReportArgs:
    """Write the report page of a run, from its folder alone, and print its results."""

    run: tyro.conf.Positional[Path]
    """Run folder."""


def main(argv: Sequence[str]) -> None:
    """Print the results of a run and the path of its report page. Raises BadInput."""
    run = read_run(parse_flags(ReportArgs, argv, prog="python -m experiment.report").run)
    print(*_results(run), f"assets: {run.description['looks']}", write_report(run), sep="\n")


if __name__ == "__main__":
    sys.exit(main_guard("experiment.report", main))
