"""The picture of a run shows the numbers that were recorded, at their env steps."""

import json

import imageio.v2 as imageio
import matplotlib.pyplot as plt
import pytest

from configs.config import PhaseConfig, TrainConfig
from rl import report
from rl.report import before_and_after, plot_curves

ROWS = [
    {"global_step": 0, "eval/teacher_success": 0.9, "eval/teacher_success_low": 0.6, "eval/teacher_success_high": 0.98,
     "eval/student_success": 0.5, "eval/student_success_low": 0.2, "eval/student_success_high": 0.8},
    {"global_step": 100, "rollout/success_rate": 0.75, "distill/loss": 2.0, "distill/accuracy": 0.4,
     "time/sim": 3.0, "time/update": 5.0},
    {"global_step": 200, "rollout/success_rate": 0.25, "train/clip_fraction": 0.125, "train/approx_kl": 0.01,
     "train/ratio_mean": 1.0, "time/sim": 4.0, "time/update": 6.0},
]  # fmt: skip


def draw(folder, monkeypatch, rows, phases=None):
    """The figure that plot_curves saved, still open."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = []
    with monkeypatch.context() as patch:
        patch.setattr(report.plt, "close", figures.append)
        path = plot_curves(folder, TrainConfig(phases=phases or PhaseConfig()))
    return path, figures[0]


@pytest.fixture(autouse=True)
def _no_figure_stays_open():
    yield
    plt.close("all")


def lines(figure) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for axis in figure.axes:
        for line in axis.get_lines():
            found[line.get_label()] = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
    return found


def test_a_picture_lies_in_the_report_folder(tmp_path, monkeypatch):
    path, _ = draw(tmp_path, monkeypatch, ROWS)
    assert path == tmp_path / "report" / "curves.png"
    image = imageio.imread(path)
    assert image.ndim == 3
    assert image.std() > 0


def test_curves_are_the_recorded_numbers_against_env_steps(tmp_path, monkeypatch):
    drawn = lines(draw(tmp_path, monkeypatch, ROWS)[1])
    assert drawn["training rollouts"] == [(100, 0.75), (200, 0.25)]
    assert drawn["distillation loss (nats)"] == [(100, 2.0)]
    assert drawn["agreement with the teacher"] == [(100, 0.4)]
    assert drawn["clip fraction"] == [(200, 0.125)]
    assert drawn["sim"] == [(100, 3.0), (200, 4.0)]
    assert drawn["update"] == [(100, 5.0), (200, 6.0)]


def test_evaluations_have_their_intervals_as_bars(tmp_path, monkeypatch):
    _, figure = draw(tmp_path, monkeypatch, ROWS)
    bars = {container.get_label(): container for container in figure.axes[0].containers}
    assert set(bars) == {"teacher", "student, greedy"}  # what was not evaluated is not drawn
    ((_, low), (_, high)) = bars["teacher"].lines[2][0].get_segments()[0]
    assert (low, high) == pytest.approx((0.6, 0.98))


@pytest.mark.parametrize(
    ("phases", "spans"),
    [
        (PhaseConfig(warmup_steps=10, transition_steps=20, total_steps=100), [(0, 10), (10, 30), (30, 100)]),
        (PhaseConfig(warmup=False, total_steps=100), [(0, 100)]),
        (PhaseConfig(warmup_steps=60, transition_steps=80, total_steps=100), [(0, 60), (60, 100)]),
        (PhaseConfig(warmup_steps=60, total_steps=100, warmup_only=True), [(0, 60)]),
    ],
)
def test_phases_are_shaded_where_they_are(tmp_path, monkeypatch, phases, spans):
    _, figure = draw(tmp_path, monkeypatch, ROWS, phases)
    found = sorted((patch.get_x(), patch.get_x() + patch.get_width()) for patch in figure.axes[0].patches)
    assert found == [tuple(map(float, span)) for span in spans]


@pytest.mark.parametrize("rows", [[], ROWS[:1]])
def test_a_run_that_has_hardly_begun_can_be_drawn(tmp_path, monkeypatch, rows):
    assert draw(tmp_path, monkeypatch, rows)[0].is_file()


def test_no_figure_is_left_in_memory(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    plot_curves(tmp_path, TrainConfig())
    assert plt.get_fignums() == []


def test_the_first_and_the_last_evaluation_are_compared(tmp_path):
    def evaluation(step, sampled, greedy):
        counts = {"eval/student_sampled_success": sampled, "eval/student_success": greedy}
        return {"global_step": step} | {f"{key}_k": k for key, k in counts.items()} | {
            f"{key}_n": 20 for key in counts
        } | {"eval/student_success": greedy / 20}  # fmt: skip

    rows = [evaluation(0, 4, 10), ROWS[1], evaluation(50, 20, 0), evaluation(99, 16, 15)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampled, greedy = before_and_after(tmp_path)
    for line, name, rates in (
        (sampled, "sampled success", ("4/20 = 20 %", "before", "16/20 = 80 %", "after")),
        (greedy, "greedy success", ("10/20 = 50 %", "before", "15/20 = 75 %", "after")),
    ):
        places = [line.index(part) for part in (name, *rates)]
        assert places == sorted(places)
