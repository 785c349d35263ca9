"""The curves are the recorded numbers, at their env steps, in the colours of their phases."""

import matplotlib.pyplot as plt
import pytest

from rl.panels import (
    COLOURS,
    LIGHT,
    PANELS,
    PHASE_COLOURS,
    draw_panel,
    draw_success,
    draw_time,
    head,
)  # fmt: skip
from tests.stored_runs import ROWS, evaluation, update


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


def panel_of(metric: str):
    return next(panel for panel in PANELS if metric in (*panel.left, *panel.right))


def test_a_panel_shows_the_recorded_numbers_against_env_steps(axis):
    draw_panel(axis, panel_of("train/approx_kl"), ROWS)
    assert lines(axis) == {
        "approx. KL": [(200, 0.01), (300, 0.02)],
        "clip fraction": [(200, 0.125), (300, 0.25)],
    }


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_panel_can_be_drawn_and_has_a_reading(axis, panel):
    metrics = dict.fromkeys((*panel.left, *panel.right), 0.5)
    draw_panel(axis, panel, [update(100, 0, **metrics), update(200, 2, **metrics)])
    assert set(lines(axis)) == {*panel.left.values(), *panel.right.values()}
    assert panel.reading.endswith(".")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("panel", [panel for panel in PANELS if panel.log_scale], ids=lambda panel: panel.title)
@pytest.mark.parametrize(("values", "scale"), [((0.0, 0.0), "linear"), ((0.0, 0.1), "log")])
def test_a_curve_of_zeros_alone_is_drawn_without_a_word(axis, panel, values, scale):
    draw_panel(axis, panel, [update(100 * i, 2, **dict.fromkeys(panel.left, value)) for i, value in enumerate(values)])
    axis.figure.canvas.draw()
    assert axis.get_yscale() == scale


def test_success_has_intervals_as_bars_and_rollouts_as_dots(axis):
    draw_success(axis, ROWS)
    assert lines(axis)["training rollouts"] == [(100, 0.5), (200, 0.5), (300, 0.5)]
    bars = {container.get_label(): container for container in axis.containers}
    assert set(bars) == {"teacher", "student, greedy", "student, sampled"}
    ((_, low), (_, high)) = bars["student, sampled"].lines[2][0].get_segments()[0]
    assert (low, high) == pytest.approx((0.0807, 0.4160), abs=1e-3)  # Wilson's interval of 4 of 20


def test_phases_are_shaded_where_they_were(axis):
    draw_success(axis, [evaluation(0, 1, 1, 1), update(100, 0), update(250, 1), update(400, 2), update(500, 2)])
    spans = sorted((p.get_x(), p.get_x() + p.get_width(), p.get_facecolor()[:3]) for p in axis.patches)
    colours = [plt.matplotlib.colors.to_rgb(colour) for colour in PHASE_COLOURS]
    assert spans == [
        (0, 100, colours[0]), (100, 250, colours[1]), (250, 400, colours[2]), (400, 500, colours[2])
    ]  # fmt: skip


def test_time_is_stacked_by_update_and_evaluations_count_where_they_happened(axis):
    draw_time(axis, ROWS)
    bars = {bar.get_label(): [(r.get_y(), r.get_height()) for r in bar] for bar in axis.containers}
    assert bars["rollout"] == [(0, 0), (0, 3), (0, 3), (0, 3)]
    assert bars["update"] == [(0, 0), (3, 2), (3, 2), (3, 2)]
    assert bars["evaluation"] == [(0, 7), (5, 0), (5, 7), (5, 7)]


@pytest.mark.parametrize("rows", [[], ROWS[:1]])
@pytest.mark.parametrize("draw", [draw_success, draw_time, lambda axis, rows: draw_panel(axis, PANELS[0], rows)])
def test_a_run_that_has_hardly_begun_can_be_drawn(axis, rows, draw):
    draw(axis, rows)
    axis.figure.canvas.draw()


def test_the_legend_stays_within_its_figure(axis):
    handles = [axis.plot([0], [0], label=f"a rather long label {i}")[0] for i in range(5)]
    head(axis, "title", handles)
    axis.figure.canvas.draw()
    box = axis.get_legend().get_window_extent()
    assert box.x1 <= axis.figure.bbox.x1


def test_no_colour_has_two_names():
    assert len(set(LIGHT.values())) == len(COLOURS)
