"""Write the report page of a run from its folder: `python -m experiment.report RUN` writes report/index.html.

The page is one file: charts, first frame and videos are inside. It needs no network and no program but a browser.
"""

import base64
import gc
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from command_line import main_guard, parse_flags
from contracts import BadInput, first_line, output_place, replaced
from experiment.stored_run import FRAMES_PER_SECOND, StoredRun, read_run, video_folder
from experiment.verdict import Evaluation, best_evaluation, changes, judge, read_evaluations

log = logging.getLogger(__name__)

TEMPLATES = Path(__file__).parent / "templates"


def write_report(run: StoredRun) -> Path:
    """Write report/index.html from the run's files; returns its path."""
    # Only here, because matplotlib takes 0.8 s, which evaluations do not need.
    from experiment.charts import draw_metrics, draw_success

    page = run.folder / "report" / "index.html"
    page.parent.mkdir(exist_ok=True)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    environment.filters["data_uri"] = _data_uri
    environment.globals |= {"changes": changes, "draw_metrics": draw_metrics, "draw_success": draw_success}
    evaluations = read_evaluations(run)
    commands = (run.description["argv"], *run.description.get("resume_argv", []))
    text = environment.get_template("report.html").render(
        run=run,
        written=time.strftime("%Y-%m-%d %H:%M"),
        verdict=judge(run, evaluations),
        evaluations=evaluations,
        best=best_evaluation(evaluations) if evaluations else None,
        first_frame=run.folder / "first_frame.png",
        videos=_videos(run, evaluations),
        commands=[shlex.join(["python", "train_grpo.py", *argv]) for argv in commands],
    )
    with replaced(page) as draft:
        draft.write_text(text, encoding="utf-8")  # as the page says
    return page


def _videos(run: StoredRun, evaluations: Sequence[Evaluation]) -> dict[Path, str]:
    """The videos of the first and the last evaluation, as far as they exist, each of them once, with captions."""
    videos: dict[Path, str] = {}  # a student that is still its teacher has the teacher's video
    for evaluation in (*evaluations[:1], *evaluations[-1:]):
        env_steps = evaluation.env_steps
        when = f"after {env_steps:,} env steps of training" if env_steps else "before training"
        for result in evaluation.episodes:
            file = video_folder(run.folder, env_steps) / (result.video or "none")
            if file.is_file():
                ending = "success" if result.success else "failure"
                seconds = result.env_steps / FRAMES_PER_SECOND
                start = f"task {result.task_id}, initial state {result.init_state_id}"
                caption = f"{result.rule} {when}: {ending} after {seconds:.1f} s; {start}"
                videos.setdefault(file, caption)
    return videos


def _data_uri(content: bytes, kind: str) -> str:
    """A picture or video as the value of a `src` attribute."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def update_report(folder: Path) -> None:
    """Write the report of a run that goes on. A failure is logged and does not stop the program."""
    try:
        write_report(read_run(folder))
    except Exception as error:
        command = f"python -m experiment.report {shlex.quote(str(folder))}"
        log.warning("the report could not be written (%s); to try again, run: %s", first_line(error), command)
    # Charts are garbage in cycles. By itself Python collects it only when there are a quarter as many objects as live
    # ones: 30 MiB more after some evaluations.
    gc.collect()


def conclude(folder: Path) -> None:
    """At the end of a run, log its results, as far as they can be read, and where its report is."""
    try:
        run = read_run(folder)
        for line in judge(run, read_evaluations(run)).lines:
            log.info(line)
    except BadInput as problem:
        log.warning(problem)
    log.info("report %s, videos %s", folder / "report" / "index.html", folder / "videos")


@dataclass(frozen=True)
class ReportArgs:
    """Write the report page of a run, from its folder alone, and print its results."""

    # Run folder.
    run: tyro.conf.Positional[Path]


def main(argv: Sequence[str]) -> None:
    """Print the results of a run and the path of its report page. Raises BadInput."""
    run = read_run(parse_flags(ReportArgs, argv, prog="python -m experiment.report").run)
    print(*judge(run, read_evaluations(run)).lines, f"assets: {run.description['looks']}", sep="\n")
    with output_place(run.folder, "RUN"):
        print(write_report(run))


if __name__ == "__main__":
    sys.exit(main_guard("experiment.report", main))
