"""The page of a run: its rates are those of the evaluations, and it is one file that a browser shows anywhere."""

import base64
import gc
import re
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest

from experiment.report import update_report, write_report
from experiment.stored_run import read_run, video_folder
from tests.stored_runs import PROVENANCE, ROWS, store, store_episodes

SAMPLED = ("1" * 4 + "0" * 16, "1" * 16 + "0" * 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run over two tasks with evaluations, a picture and videos."""
    folder = store(tmp_path_factory.mktemp("runs") / "a <run>", ROWS, task__task_ids=[0, 4])
    store_episodes(folder, 0, (0, 4), sampled=SAMPLED[0], teacher="10", greedy="10")
    store_episodes(folder, 300, (0, 4), sampled=SAMPLED[1], greedy="01")
    imageio.imwrite(folder / "first_frame.png", np.zeros((8, 8, 3), np.uint8))
    for step, name, content in ((0, "teacher", b"0"), (0, "greedy", b"1"), (300, "greedy", b"2")):
        video_folder(folder, step).mkdir(parents=True, exist_ok=True)
        (video_folder(folder, step) / f"{name}.mp4").write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def page(folder) -> str:
    return write_report(read_run(folder)).read_text(encoding="utf-8")


def test_the_page_holds_its_pictures_and_links_to_files_of_the_run(folder, page):
    sources = re.findall(r'src="data:([^;]*);base64,([^"]*)"', page)
    assert len(sources) == len(re.findall(r"\ssrc=", page))
    videos = {base64.b64decode(source) for kind, source in sources if kind == "video/mp4"}
    assert videos == {b"0", b"1", b"2"}
    links = set(re.findall(r'href="([^"]*)"', page))
    assert {"../evaluations/step_0.json", "../evaluations/step_300.json", "../config.json"} <= links
    assert "http" not in page


def test_rates_and_differences_are_on_the_page(page):
    # 12 of 20 more: 4 solved twice, 12 only after, 4 never, so 12 of 12 decided pairs, p = 2 / 2^12
    assert f"p = {2 / 2**12:.2g}<br>" in page
    assert "16/20 = 80 % [58, 92]" in page
    assert "task 4, sampled" in page
    assert "a &lt;run&gt;" in page  # names are escaped


@pytest.mark.parametrize(("rows", "cards"), [([], 0), (ROWS[:2], 0), (ROWS, 2)])
def test_a_run_that_has_hardly_begun_has_a_report_with_a_card_for_each_curve(tmp_path, rows, cards):
    page = write_report(read_run(store(tmp_path, rows))).read_text()
    assert "Not finished" in page
    assert page.count("<h3>") == cards


def test_a_program_that_no_git_checkout_holds_has_a_report(tmp_path, monkeypatch):
    monkeypatch.setitem(PROVENANCE, "git", {})
    assert "Commit unknown;" in write_report(read_run(store(tmp_path, ROWS))).read_text()


def test_a_run_that_goes_on_keeps_nothing_of_its_reports(folder):
    update_report(folder)
    assert gc.collect() < 2_000  # the charts are 13,000 objects; libraries leave some hundred
