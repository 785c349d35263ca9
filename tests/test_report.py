"""The page of a run: its numbers are those of metrics.jsonl, and it needs nothing but the run's folder."""

import contextlib
import io
import re
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest

from experiment.report import PANELS, draw_curves, main, write_report
from experiment.statistics import Successes
from experiment.stored_run import GREEDY, SAMPLED, read_run
from tests.stored_runs import ROWS, store, store_outcomes, update


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run over two tasks with outcomes, a picture and videos."""
    folder = store(tmp_path_factory.mktemp("runs") / "a <run>", ROWS)
    store_outcomes(folder, 0, student_sampled=[True] * 4 + [False] * 16)
    store_outcomes(folder, 300, student_sampled=[True] * 16 + [False] * 4)
    imageio.imwrite(folder / "first_frame.png", np.zeros((8, 8, 3), np.uint8))
    (folder / "videos").mkdir()
    for name in ("teacher-step_0", "student-step_0", "student-step_200", "student-step_300"):
        (folder / "videos" / f"{name}.mp4").write_bytes(b"x")
    return folder


@pytest.fixture(scope="module")
def page(folder) -> str:
    """The page that the command writes."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main([str(folder)])
    looks, sampled, _, path = output.getvalue().splitlines()
    assert looks == "assets: official (0123abcd)"
    assert sampled.startswith("student, sampled: 4/20")
    return Path(path).read_text()


def test_the_page_refers_to_files_of_the_run_only(folder, page):
    # Curves and first frame, teacher and student of the first evaluation, the best and the last student.
    references = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(references) == 6
    assert all((folder / "report" / reference).stat().st_size > 0 for reference in references)


def test_rates_differences_command_and_machine_are_on_the_page(page):
    for row in (ROWS[0], ROWS[-1]):
        for key in (SAMPLED, GREEDY):
            assert str(Successes(row[f"{key}_k"], row[f"{key}_n"])) in page
    # 12 of 20 more: 4 solved twice, 12 only after, 4 never, so 12 of 12 decided pairs, p = 2 / 2^12
    assert "+60 points" in page
    assert f"p = {2 / 2**12:.2g}, n = 20" in page
    assert "task 4, student, sampled" in page
    assert "--preset tiny --seed 3 --lr 0.001" in page
    assert "torch 2.15.0" in page
    assert "Some GPU" in page
    assert "0123456789ab, with local changes" in page
    assert "Assets: official (0123abcd)" in page


def test_names_are_escaped(page):
    assert "a &lt;run&gt;" in page
    assert "<run>" not in page


@pytest.mark.parametrize("rows", [[], ROWS[:1]])
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path, rows):
    text = write_report(read_run(store(tmp_path, rows))).read_text()
    assert "Not finished" in text
    assert ("No evaluation has been recorded yet." in text) == (not rows)


def test_every_panel_shows_the_recorded_numbers_against_env_steps():
    metrics = [metric for panel in PANELS for metric in panel.metrics]
    rows = [
        update(step, 0, **{metric: index + step for index, metric in enumerate(metrics)})
        for step in (100, 200)
    ]
    figure = draw_curves(rows)
    curves = [
        list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for axes in figure.axes
        for line in axes.lines
    ]
    assert curves == [[(100, index + 100), (200, index + 200)] for index in range(len(metrics))]
    assert [axes.get_title() for axes in figure.axes] == [panel.title for panel in PANELS]
