"""The page of a run: its numbers are those of metrics.jsonl, and it needs nothing but the run's folder."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

import imageio.v2 as imageio
import matplotlib.pyplot as plt
import numpy as np
import pytest

from configs.presets import PRESETS
from contracts import BadInput
from rl import report
from rl.curves import GREEDY, PANELS, PHASE_COLOURS, SAMPLED, draw_panel, draw_success, draw_time
from rl.report import changed_settings, changes, conclude, main, read_run, write_report
from rl.results import Successes
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


@pytest.mark.parametrize("rows", [[], ROWS[:1]])
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path, rows):
    text = Page(write_report(read_run(store(tmp_path, rows))).read_text()).text
    assert "Not finished" in text
    assert ("No evaluation has been recorded yet." in text) == (not rows)


def test_a_report_that_fails_costs_one_line(folder, monkeypatch, caplog):
    def broken(_):
        raise RuntimeError("matplotlib has\nmany words")

    monkeypatch.setattr(report, "write_report", broken)
    conclude(SimpleNamespace(folder=folder, wandb=SimpleNamespace(conclude=lambda *_: None)))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == f"no report could be written (matplotlib has); python -m rl.report {folder} tries again"


def test_the_log_and_wandb_get_the_results(folder, caplog):
    caplog.set_level("INFO")
    concluded = []
    conclude(SimpleNamespace(folder=folder, wandb=SimpleNamespace(conclude=concluded.append)))
    assert caplog.messages[0].startswith(
        "student, sampled: 4/20 = 20 % [8, 42] before, 16/20 = 80 % [58, 92] after; on"
    )
    (summary,) = concluded
    assert (summary["result/sampled_after"], summary["result/best_step"]) == (16 / 20, 200)


def test_one_run_on_the_command_line_writes_its_report(tmp_path, capsys):
    folder = store(tmp_path, ROWS)
    main([str(folder)])
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == str(folder / "report" / "index.html")
    assert shown[0].startswith("student, sampled: 4/20")


def test_several_runs_on_the_command_line_are_compared(tmp_path, capsys):
    runs = [store(tmp_path / name, ROWS, update__lr=lr) for name, lr in (("one", 0.1), ("two", 0.25))]
    main([*map(str, runs), "--out", str(tmp_path / "both.html")])
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert ["one", "two"] in lines
    assert ["lr", "0.1", "0.25"] in lines
    assert "sampled, last   16/20 = 80 % [58, 92]  16/20 = 80 % [58, 92]" in shown
    text = (tmp_path / "both.html").read_text()
    page = Page(text)
    assert page.cells[page.cells.index("lr") :][:3] == ["lr", "0.1", "0.25"]
    assert "seed" not in page.cells  # equal
    assert len(re.findall("<svg", text)) >= 5


def test_a_page_that_names_a_folder_is_one_line(tmp_path):
    runs = [str(store(tmp_path / name, ROWS)) for name in "ab"]
    with pytest.raises(BadInput, match=r"the page cannot be written there \(Is a directory\)") as caught:
        main([*runs, "--out", str(tmp_path)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [r"a$\frac$b", "a$$", "<i>"])
def test_a_run_may_be_called_anything(tmp_path, name):
    runs = [str(store(tmp_path / each, ROWS)) for each in (name, "other")]
    main(runs[:1])
    main([*runs, "--out", str(tmp_path / "both.html")])
    assert name in Page((tmp_path / "both.html").read_text()).text


# the run read back


def test_the_student_is_paired_with_its_past_and_with_the_teacher(tmp_path):
    folder = store(tmp_path, ROWS)
    store_episodes(folder, 0, teacher=[True, True], student=[False, False], student_sampled=[False, True])
    store_episodes(folder, 300, student=[True, False], student_sampled=[True, True])
    store_episodes(folder, 9999, student_sampled=[False, False])  # of records that a resume cut off
    sampled, greedy, against_teacher = (change.paired for change in changes(read_run(folder)))
    assert (sampled.only_after, sampled.only_before, sampled.both) == (1, 0, 1)
    assert (greedy.only_after, greedy.neither) == (1, 1)
    assert (against_teacher.both, against_teacher.only_before) == (1, 1)


def test_the_best_evaluation_is_that_of_the_best_checkpoint(tmp_path):
    rows = [evaluation(0, 9, 5, 5), evaluation(100, 9, 8, 5), evaluation(200, 9, 8, 5), evaluation(300, 9, 6, 5)]
    assert read_run(store(tmp_path, rows)).best_evaluation["global_step"] == 100


@pytest.mark.parametrize(("total_steps", "words"), [(300, "Finished: 300 env steps"), (301, "Not finished: 300 env")])
def test_a_run_is_finished_when_it_was_evaluated_at_its_last_step(tmp_path, total_steps, words):
    assert read_run(store(tmp_path, ROWS, phases__total_steps=total_steps)).status().startswith(words)


def test_settings_are_compared_with_the_preset_of_the_command(tmp_path):
    run = read_run(store(tmp_path, ROWS, run__seed=3, update__lr=0.001))
    assert changed_settings(run) == ("tiny", {"seed": (0, 3), "lr": (PRESETS["tiny"].update.lr, 0.001)})


def test_a_run_of_another_version_has_other_fields_and_is_read(tmp_path):
    folder = store(tmp_path, ROWS, run__seed=3)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"name": "tiny"', '"rerun": false'))
    assert changed_settings(read_run(folder))[1] == {"seed": (0, 3)}


@pytest.mark.parametrize("content", [None, "{", '{"config": 3}', "{}"])
def test_what_is_no_run_folder_is_refused_in_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInput, match="is not a run folder") as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)


# curves


@pytest.fixture
def axis():
    figure, axis = plt.subplots()
    yield axis
    plt.close(figure)


def lines(axis) -> dict[str, list[tuple[float, float]]]:
    """Curves of an axis and of the one that shares its x axis."""
    return {
        line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for one in axis.figure.axes
        for line in one.get_lines()
    }


@pytest.mark.parametrize("panel", PANELS.values(), ids=lambda panel: panel.title)
def test_every_panel_can_be_drawn_and_has_a_reading(axis, panel):
    metrics = dict.fromkeys((*panel.left, *panel.right), 0.5)
    draw_panel(axis, [update(100, 0, **metrics), update(200, 2, **metrics)], panel)
    axis.figure.canvas.draw()
    assert set(lines(axis)) == {*panel.left.values(), *panel.right.values()}
    assert panel.reading.endswith(".")


def test_a_panel_shows_the_recorded_numbers_against_env_steps(axis):
    draw_panel(axis, ROWS, PANELS["Policy change within an update"])
    assert lines(axis) == {
        "approx. KL": [(200, 0.01), (300, 0.02)],
        "clip fraction": [(200, 0.125), (300, 0.25)],
    }


def test_success_has_intervals_as_bars_and_rollouts_as_dots(axis):
    draw_success(axis, ROWS)
    assert lines(axis)["training rollouts"] == [(100, 0.5), (200, 0.5), (300, 0.5)]
    bars = {container.get_label(): container for container in axis.containers}
    assert set(bars) == {"teacher", "student, greedy", "student, sampled"}
    ((_, low), (_, high)) = bars["student, sampled"].lines[2][0].get_segments()[0]
    assert (low, high) == pytest.approx((0.0807, 0.4160), abs=1e-3)  # Wilson's interval of 4 of 20


def test_phases_are_shaded_where_they_were(axis):
    draw_success(axis, [evaluation(0, 1, 1, 1), update(100, 0), update(250, 1), update(400, 2), update(500, 2)])
    spans = sorted((p.get_x(), p.get_x() + p.get_width(), p.get_facecolor()) for p in axis.patches)
    colours = [plt.matplotlib.colors.to_rgba(colour) for colour in PHASE_COLOURS]
    assert spans == [
        (0, 100, colours[0]), (100, 250, colours[1]), (250, 400, colours[2]), (400, 500, colours[2])
    ]  # fmt: skip


def test_time_is_stacked_by_update_and_evaluations_count_where_they_happened(axis):
    draw_time(axis, ROWS)
    bars = {bar.get_label(): [(r.get_y(), r.get_height()) for r in bar] for bar in axis.containers}
    assert bars["rollout"] == [(0, 0), (0, 3), (0, 3), (0, 3)]
    assert bars["update"] == [(0, 0), (3, 2), (3, 2), (3, 2)]
    assert bars["evaluation"] == [(0, 7), (5, 0), (5, 7), (5, 7)]
