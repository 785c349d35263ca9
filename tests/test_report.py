"""The page of a run: its numbers are those of metrics.jsonl, and it needs nothing but the run's folder."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import imageio.v2 as imageio
import numpy as np
import pytest

from rl import report
from rl.evaluation import Successes
from rl.report import before_and_after, conclude, main, plot_curves, summary, tables, write_report
from rl.stored_run import GREEDY, SAMPLED, read_run
from tests.stored_runs import ROWS, evaluation, store, store_episodes, update

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects text, references and cells."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.references, self.cells, self.open = "", [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href", "poster")]
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data):
        self.text += data
        if self.open and self.cells and {"td", "th"} & set(self.open):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run over two tasks with outcomes, a picture and videos."""
    of_tasks = {f"{key}_task_{task}": 0.5 for key in (GREEDY, SAMPLED) for task in (0, 4)}
    rows = [row | of_tasks if GREEDY in row else row for row in ROWS]
    path = store(tmp_path_factory.mktemp("runs") / "a <run>", rows, task__task_ids=[0, 4], update__lr=0.001)
    store_episodes(path, 0, student_sampled=[True] * 4 + [False] * 16)
    store_episodes(path, 300, student_sampled=[True] * 16 + [False] * 4)
    imageio.imwrite(path / "first_frame.png", np.zeros((8, 8, 3), np.uint8))
    (path / "videos").mkdir()
    for name in ("teacher-step_0", "student-step_0", "student-step_200", "student-step_300"):
        (path / "videos" / f"{name}.mp4").write_bytes(b"x")
    return path


@pytest.fixture(scope="module")
def html(folder) -> str:
    return write_report(read_run(folder)).read_text()


@pytest.fixture(scope="module")
def page(html) -> Page:
    return Page(html)


def test_nothing_is_loaded_from_a_network(html, page):
    assert [r for r in page.references if re.match(r"\w+:|//", r) and not r.startswith("data:image/png;")] == []
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert "://" not in without_namespaces
    assert "@import" not in html
    assert "<script" not in html


def test_local_references_exist(folder, html, page):
    files = [r for r in page.references if not r.startswith(("#", "data:"))]
    assert len(files) == 4  # teacher and student of the first evaluation, the best and the last student
    assert all((folder / "report" / file).is_file() for file in files)
    ids = set(re.findall(r'\bid="([^"]*)"', html))
    inside = [r[1:] for r in page.references if r.startswith("#")] + re.findall(r"url\(#([^)]*)\)", html)
    assert inside
    assert set(inside) <= ids


def test_figures_are_well_formed_svg_that_follows_light_and_dark(html):
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(figures) > 5
    for figure in figures:
        ElementTree.fromstring(figure)
        fixed = set(re.findall(r"(?:fill|stroke): (#\w+)", figure))
        assert not fixed - {"#ffffff", "#000000"}, fixed
    assert "@media (prefers-color-scheme: dark)" in html


def test_rates_are_those_of_the_records(page):
    text = " ".join(" ".join(page.cells).split())
    for row in (ROWS[0], ROWS[-1]):
        for key in (SAMPLED, GREEDY):
            assert str(Successes(row[f"{key}_k"], row[f"{key}_n"])) in text
    assert "5/10 = 50 %" in text  # of a task
    assert "pick up the black bowl" in text


def test_the_difference_is_that_of_the_paired_episodes(page):
    # 12 of 20 more: 4 solved twice, 12 only after, 4 never, so 12 of 12 decided pairs, p = 2 / 2^12
    assert "+60 points" in page.text
    assert f"p = {2 / 2**12:.2g}" in page.text


def test_command_changed_settings_versions_and_machine_are_told(page):
    cells = [cell.strip() for cell in page.cells]
    assert cells[cells.index("lr") + 2] == "0.001"
    for part in ("--preset tiny --seed 3 --lr 0.001", "torch 2.15.0", "Some GPU", "0123456789ab, with local changes"):
        assert part in page.text
    assert "<run>" in page.text  # escaped: the parser saw no tag


def test_what_was_not_recorded_is_named_and_not_drawn(page):
    assert "Not recorded in this run: " in page.text
    missing = page.text.split("Not recorded in this run: ")[1].split(".")[0]
    assert "Critic" in missing
    assert "Warmup: distillation" not in missing


def test_a_report_is_a_function_of_the_folder(folder, html, monkeypatch):
    again = write_report(read_run(folder)).read_text()
    assert re.sub(r"Written [^;]*", "", again) == re.sub(r"Written [^;]*", "", html)


@pytest.mark.parametrize("rows", [[], ROWS[:1]])
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path, rows):
    text = Page(write_report(read_run(store(tmp_path, rows))).read_text()).text
    assert "Not finished" in text
    assert ("No evaluation has been recorded yet." in text) == (not rows)


def test_the_picture_shows_something(tmp_path):
    image = imageio.imread(plot_curves(read_run(store(tmp_path, ROWS))))
    assert image.ndim == 3
    assert image.std() > 0


def test_the_log_tells_sampled_and_greedy_before_and_after(tmp_path):
    folder = store(tmp_path, [evaluation(0, 9, 10, 4), update(50, 0), evaluation(99, 9, 15, 16)])
    sampled, greedy = before_and_after(read_run(folder))
    assert sampled.startswith("student, sampled: 4/20 = 20 % [8, 42] before, 16/20 = 80 % [58, 92] after")
    assert greedy.startswith("student, greedy: 10/20 = 50 %")


def test_wandb_gets_the_results_and_records_with_equal_keys(folder):
    run = read_run(folder)
    assert summary(run)["result/sampled_after"] == 16 / 20
    assert summary(run)["result/sampled_change"] == pytest.approx(12 / 20)
    assert summary(run)["result/best_step"] == 200
    of_run = tables(run)
    assert [row["global_step"] for row in of_run["tables/evaluations"]] == [0, 200, 300]
    assert all(row["video"].is_file() for row in of_run["tables/evaluations"])
    for records in of_run.values():
        assert len({tuple(record) for record in records}) == 1


def test_a_report_that_fails_costs_one_line(folder, monkeypatch, caplog):
    def broken(_):
        raise RuntimeError("matplotlib has\nmany words")

    monkeypatch.setattr(report, "write_report", broken)
    conclude(SimpleNamespace(folder=folder, wandb=SimpleNamespace(conclude=lambda *_: None)))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == f"no report could be written (matplotlib has); python -m rl.report {folder} tries again"


def test_one_run_on_the_command_line_writes_its_report(tmp_path, capsys):
    folder = store(tmp_path, ROWS)
    main([str(folder)])
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == str(folder / "report" / "index.html")
    assert shown[0].startswith("student, sampled: 4/20")


def test_several_runs_on_the_command_line_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    runs = [store(tmp_path / name, ROWS, update__lr=lr) for name, lr in (("one", 0.1), ("two", 0.25))]
    main([*map(str, runs), "--out", str(tmp_path / "both.html")])
    shown = capsys.readouterr().out
    for part in ("one", "two", "4/20 = 20 % [8, 42]", "16/20 = 80 %", "0.1", "0.25"):
        assert part in shown
    text = (tmp_path / "both.html").read_text()
    page = Page(text)
    cells = [" ".join(cell.split()) for cell in page.cells]
    header = cells[: cells.index("lr") + 1]
    for name, lr in (("one", "0.1"), ("two", "0.25")):
        row = cells[cells.index(name) :][: len(header)]
        assert row[1] == "300"
        assert row[3] == str(Successes(16, 20))
        assert row[-1] == lr
    assert "preset" not in header
    assert [r for r in page.references if not r.startswith("#")] == []
    assert len(re.findall("<svg", text)) >= 5
