"""The page of a run: its numbers are those of metrics.jsonl, and it is one file that a browser can show anywhere."""

import base64
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest

from experiment.charts import SIZE, Axis, short
from experiment.report import PANELS, conclude, make_cards, write_report
from experiment.run_files import CONFIG_FILE
from experiment.statistics import Successes
from experiment.stored_run import GREEDY, SAMPLED, read_run
from tests.stored_runs import ROWS, store, store_outcomes, update

ROOT = Path(__file__).parents[1]
BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A resumed run over two tasks with outcomes, a picture and videos."""
    folder = store(tmp_path_factory.mktemp("runs") / "a <run>", ROWS)
    description = json.loads((folder / CONFIG_FILE).read_text())
    resumed = {**description, "resume_argv": [["--resume", "runs/a <run>", "--total-steps", "300"]]}
    (folder / CONFIG_FILE).write_text(json.dumps(resumed))
    store_outcomes(folder, 0, student_sampled=[True] * 4 + [False] * 16, teacher=[True], student=[True])
    store_outcomes(folder, 300, student_sampled=[True] * 16 + [False] * 4, student=[False])
    imageio.imwrite(folder / "first_frame.png", np.zeros((8, 8, 3), np.uint8))
    (folder / "videos").mkdir()
    videos = {
        "teacher-step_0": b"0",
        "student-step_0": b"0",
        "student-step_200": b"2",
        "student-step_300": b"3",
    }
    for name, content in videos.items():
        (folder / "videos" / f"{name}.mp4").write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def page(folder) -> str:
    """The page that the command writes, here where the locale knows no arrow."""
    environ = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "experiment.report", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    _, sampled, _, looks, path = done.stdout.splitlines()
    assert looks == "assets: official (0123abcd)"
    assert sampled.startswith("student, sampled: 4/20")
    return Path(path).read_text(encoding="utf-8")


def test_the_page_holds_its_pictures_and_links_to_files_of_the_run(folder, page):
    sources = re.findall(r'src="data:[^,]*,([^"]*)"', page)
    contents = {base64.b64decode(source) for source in sources}
    # The student of the first evaluation is the teacher, and those of the best and the last one follow.
    assert contents == {b"0", b"2", b"3", (folder / "first_frame.png").read_bytes()}
    assert len(sources) == len(re.findall(r"\ssrc=", page))
    links = re.findall(r'href="([^"]*)"', page)
    assert {"../config.json", "../metrics.jsonl", "../evaluations/step_300.json"} <= set(links)
    assert all((folder / "report" / link).is_file() for link in links)
    assert "http" not in page


def test_at_the_end_a_run_logs_its_students_changes_over_all_tasks_and_no_others(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{key: value for key, value in row.items() if "sampled" not in key} for row in ROWS]
    folder = store(tmp_path, rows)  # as with --eval-trials 0; the teacher is not its first student
    store_outcomes(folder, 0, student=[False, False])
    store_outcomes(folder, 300, student=[True, True])
    conclude(folder)
    assert [line.split(":")[0] for line in caplog.messages[1:-1]] == ["student, greedy"]


def test_a_video_says_how_its_episode_ended(page):
    assert "student before training: success after 50 env steps (2.5 s); task 0, initial state 30" in page
    assert "student after 200 env steps: its outcome was not kept" in page
    assert "student after 300 env steps: failure" in page


def test_rates_differences_commands_and_machine_are_on_the_page(page):
    for row in (ROWS[0], ROWS[3], ROWS[-1]):
        for key in (SAMPLED, GREEDY):
            assert str(Successes(row[f"{key}_k"], row[f"{key}_n"])) in page
    # 12 of 20 more: 4 solved twice, 12 only after, 4 never, so 12 of 12 decided pairs, p = 2 / 2^12
    assert "+60 points" in page
    assert f"p = {2 / 2**12:.2g}, n = 20" in page
    assert "task 4, student, sampled" in page
    assert "python train_grpo.py --preset tiny --seed 3 --lr 0.001\npython train_grpo.py --resume" in page
    assert "torch 2.15.0" in page
    assert "Some GPU" in page
    assert "0123456789ab, with local changes" in page
    assert "Assets: official (0123abcd)" in page


def test_names_are_escaped(page):
    assert "a &lt;run&gt;" in page
    assert "<run>" not in page


@pytest.mark.parametrize("rows", [[], ROWS[:1]])
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path, rows):
    page = write_report(read_run(store(tmp_path, rows))).read_text()
    assert "Not finished" in page
    assert "Background" not in page  # of no phase yet
    assert {
        tick.label for _, charts in make_cards(rows).items() for _, chart in charts for tick in chart.x_ticks
    } <= {"0"}


def test_every_card_shows_the_recorded_numbers_against_env_steps():
    metrics = [metric for panel in PANELS for metric in panel.metrics]
    rows = [
        update(step, 0, **{metric: index + step for index, metric in enumerate(metrics, start=1)})
        for step in (100, 150, 200)
    ]
    cards = [card for cards in make_cards(rows).values() for card in cards]
    assert [panel for panel, _ in cards] == PANELS
    curves = [curve for _, chart in cards for curve in chart.curves]
    assert [curve.metric for curve in curves] == metrics
    for index, curve in enumerate(curves, start=1):
        assert [point.x for point in curve.points] == [SIZE / 2, SIZE * 3 / 4, SIZE]
        heights = [point.y for point in curve.points]
        assert heights == sorted(heights, reverse=True)  # downwards
        assert curve.last in (f"{index + 200}", f"{100 * (index + 200)} %")


@pytest.mark.parametrize(
    ("low", "high"), [(0.9989, 1.0002), (1.4399, 1.4411), (1200, 1203), (2.3e-7, 2.6e-7), (0, 9)]
)
def test_ticks_have_labels_that_differ(low, high):
    labels = [tick.label for tick in Axis(low, high).ticks()]
    assert 3 <= len(labels) == len(set(labels))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0214, "0.0214"), (999.4, "999"), (999.7, "1k"), (1500, "1.5k"), (-999_700, "-1M"), (2.5e6, "2.5M")],
)
def test_the_unit_of_a_number_is_that_of_the_rounded_number(value, text):
    assert short(value) == text


def test_a_panel_of_which_nothing_was_recorded_has_no_card():
    titles = [panel.title for cards in make_cards(ROWS[:2]).values() for panel, _ in cards]
    assert titles == [
        "Training rollouts",
        "Distillation loss",
        "Agreement with the teacher",
        "Gradient norm",
        "Wall time",
    ]


# Measures the page in frames of several widths: what sticks out on the right, what was loaded, and the texts that are
# small or that stand out little from what is behind them (contrast by WCAG 2).
MEASURE = """
function luminance(colour) {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function measure(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, faults = [];
  for (const element of page.querySelectorAll("body *:not(svg *)")) {
    const box = element.getBoundingClientRect(), style = view.getComputedStyle(element);
    const text = [...element.childNodes].filter(n => n.nodeType == 3).map(n => n.data.trim()).join("");
    if (box.right > frame.width) faults.push("sticks out: " + element.tagName + " " + text);
    if (!text || !box.width) continue;
    let behind = element;
    while (view.getComputedStyle(behind).backgroundColor == "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    const contrast = Math.log((luminance(style.color) + 0.05) /
                              (luminance(view.getComputedStyle(behind).backgroundColor) + 0.05));
    if (Math.abs(contrast) < Math.log(4.5)) faults.push("little contrast: " + text);
    if (parseFloat(style.fontSize) < 11) faults.push("small: " + text);
  }
  return {width: frame.width, faults, background: luminance(view.getComputedStyle(page.body).backgroundColor),
          loaded: view.performance.getEntriesByType("resource").filter(e => !e.name.startsWith("data:")).length};
}
onload = () => document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(measure));
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("is_dark", [False, True])
def test_in_a_browser_all_is_within_the_page_and_readable(page, tmp_path, is_dark):
    frames = [
        f'<iframe width={width} height=900 srcdoc="{html.escape(page)}"></iframe>' for width in (400, 1300)
    ]
    (tmp_path / "frames.html").write_text(f"<script>{MEASURE}</script>{''.join(frames)}")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    flags.append(f"--blink-settings=preferredColorScheme={0 if is_dark else 1}")
    command = [BROWSER, *flags, "--dump-dom", f"file://{tmp_path / 'frames.html'}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    measured = json.loads(html.unescape(re.search("<title>(.*?)</title>", shown)[1]))
    assert [frame["width"] for frame in measured] == ["400", "1300"]
    for frame in measured:
        assert frame["faults"] == []
        assert frame["loaded"] == 0
        assert (frame["background"] < 0.1) == is_dark
