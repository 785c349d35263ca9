"""The page of a run: its numbers are those of metrics.jsonl, and it needs nothing but the run's folder."""

import contextlib
import io
import re
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest

from contracts import BadInput
from experiment.report import PANELS, draw_curves, main, write_report
from experiment.statistics import Successes
from experiment.stored_run import GREEDY, SAMPLED, changes, read_run, read_training
from tests.stored_runs import PROVENANCE, ROWS, evaluation, store, store_episodes, update


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run over two tasks with outcomes, a picture and videos."""
    path = store(tmp_path_factory.mktemp("runs") / "a <run>", ROWS)
    store_episodes(path, 0, student_sampled=[True] * 4 + [False] * 16)
    store_episodes(path, 300, student_sampled=[True] * 16 + [False] * 4)
    imageio.imwrite(path / "first_frame.png", np.zeros((8, 8, 3), np.uint8))
    (path / "videos").mkdir()
    for name in ("teacher-step_0", "student-step_0", "student-step_200", "student-step_300"):
        (path / "videos" / f"{name}.mp4").write_bytes(b"x")
    return path


@pytest.fixture(scope="module")
def page(folder) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main([str(folder)])
    looks, before_and_after, *_, path = shown.getvalue().splitlines()
    assert looks == "assets: official (0123abcd)"
    assert before_and_after.startswith("student, sampled: 4/20")
    return Path(path).read_text()


def test_the_page_refers_to_files_of_the_run_only(folder, page):
    # Curves and first frame, teacher and student of the first evaluation, the best and the last student.
    references = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(references) == 6
    assert all((folder / "report" / file).stat().st_size > 0 for file in references)


def test_rates_differences_command_and_machine_are_told(page):
    for row in (ROWS[0], ROWS[-1]):
        for key in (SAMPLED, GREEDY):
            assert str(Successes(row[f"{key}_k"], row[f"{key}_n"])) in page
    # 12 of 20 more: 4 solved twice, 12 only after, 4 never, so 12 of 12 decided pairs, p = 2 / 2^12
    assert "+60 points" in page
    assert f"p = {2 / 2**12:.2g}, n = 20" in page
    assert "task 4, student, sampled" in page
    for part in ("--preset tiny --seed 3 --lr 0.001", "torch 2.15.0", "Some GPU", "0123456789ab, with local changes",
                 "Assets: official (0123abcd)"):  # fmt: skip
        assert part in page
    assert "a &lt;run&gt;" in page
    assert "<run>" not in page


@pytest.mark.parametrize("rows", [[], ROWS[:1]])
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path, rows):
    text = write_report(read_run(store(tmp_path, rows))).read_text()
    assert "Not finished" in text
    assert ("No evaluation has been recorded yet." in text) == (not rows)


# the run read back


def test_the_student_is_paired_with_its_past_and_with_the_teacher(tmp_path):
    folder = store(tmp_path, ROWS)
    store_episodes(folder, 0, teacher=[True, True], student=[False, False], student_sampled=[False, True])
    store_episodes(folder, 300, student=[True, False], student_sampled=[True, True])
    store_episodes(folder, 9999, student_sampled=[False, False])  # of records that a resume cut off
    sampled, greedy, against_teacher, *of_tasks = (change.paired for change in changes(read_run(folder)))
    assert (sampled.only_after, sampled.only_before, sampled.both) == (1, 0, 1)
    assert (greedy.only_after, greedy.neither) == (1, 1)
    assert (against_teacher.both, against_teacher.only_before) == (1, 1)
    assert [paired.n for paired in of_tasks] == [1] * 4  # sampled and greedy on both tasks
    assert (of_tasks[0].only_after, of_tasks[1].both) == (1, 1)


def test_a_checkpoint_knows_what_its_training_took(tmp_path):
    folder = store(tmp_path / "run", [*ROWS[:-1], ROWS[-1] | {"system/gpu_mem_gb": 3.0}])
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best").write_text("step_200\n")
    taken = read_training(folder / "checkpoints" / "best")
    assert (taken["env_steps"], taken["peak_gpu_gib"]) == (200, 0.0)  # not what came after it
    assert taken["hours"] == taken["gpu_hours"] == pytest.approx((7 + 5 + 5 + 7) / 3600)
    assert read_training(folder / "checkpoints" / "step_300")["peak_gpu_gib"] == 3.0
    assert (taken["config"]["run"]["seed"], taken["machine"], taken["run"]) == (
        0,
        PROVENANCE["machine"],
        "run",
    )
    assert (
        read_training(store(tmp_path / "cpu", ROWS, model__device="cpu") / "checkpoints/step_300")[
            "gpu_hours"
        ]
        == 0
    )
    assert read_training(tmp_path / "merged") is None


def test_the_best_evaluation_is_that_of_the_best_checkpoint(tmp_path):
    rows = [
        evaluation(0, 9, 5, 5),
        evaluation(100, 9, 8, 5),
        evaluation(200, 9, 8, 5),
        evaluation(300, 9, 6, 5),
    ]
    assert read_run(store(tmp_path, rows)).best_evaluation["global_step"] == 100


@pytest.mark.parametrize("content", [None, "{", '{"config": 3}', "{}"])
def test_what_is_no_run_folder_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInput, match="is not a run folder"):
        read_run(tmp_path)


# curves


def test_every_panel_shows_the_recorded_numbers_against_env_steps():
    keys = [key for panel in PANELS for key in panel.metrics]
    rows = [update(step, 0, **{key: i + step for i, key in enumerate(keys)}) for step in (100, 200)]
    figure = draw_curves(rows)
    drawn = [
        list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for a in figure.axes for line in a.lines
    ]
    assert drawn == [[(100, i + 100), (200, i + 200)] for i in range(len(keys))]
    assert [axis.get_title() for axis in figure.axes] == [panel.title for panel in PANELS]
    assert all(panel.reading.endswith(".") for panel in PANELS)
