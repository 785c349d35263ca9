"""Lay out the charts of the report page: values become positions in a picture of 1000 by 1000 units.

The template stretches the picture to any width and writes the labels as text of the page, so they stay readable on a
narrow screen. The page's style sheet gives the colours, also for dark screens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experiment.run_files import MetricsRow
from rl.phases import Phase

SIZE = 1000
HEADROOM = 0.08  # share of the values' range that is left free above and below them
SMALL = 0.4  # the axis of positive values begins at 0 if the lowest is below this share of the highest


class Tick(NamedTuple):
    position: float  # in per cent of the axis
    label: str


class Axis(NamedTuple):
    """A range of values that is drawn from one end of the picture to the other."""

    low: float
    high: float

    def position(self, value: float) -> float:
        """Where a value lies between the two ends, from 0 to SIZE."""
        return round(SIZE * (value - self.low) / (self.high - self.low), 1)

    def ticks(self) -> list[Tick]:
        """Three to five round numbers."""
        length = self.high - self.low
        power = 10 ** math.floor(math.log10(length / 5))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= length / 5)
        multiples = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        # Enough digits that neighbouring labels differ.
        digits = max(3, 2 + math.floor(math.log10(max(abs(self.low), abs(self.high)) / step)))
        return [Tick(100 * (step * n - self.low) / length, short(step * n, digits)) for n in multiples]


class Point(NamedTuple):
    """A recorded value with its interval, which is the value alone where none was recorded."""

    x: float
    y: float  # counted downwards, as in SVG
    top: float
    bottom: float


@dataclass(frozen=True)
class Curve:
    """The values of one metric against env steps."""

    metric: str
    label: str
    last: str  # the last value, as text
    points: Sequence[Point]

    @property
    def line(self) -> str:
        """The points as the `d` of an SVG path."""
        return "M" + " L".join(f"{point.x} {point.y}" for point in self.points)

    @property
    def band(self) -> str:
        """The outline of all intervals as the `d` of an SVG path; empty if no point has one."""
        if all(point.top == point.bottom for point in self.points):
            return ""
        above = [f"{point.x} {point.top}" for point in self.points]
        below = [f"{point.x} {point.bottom}" for point in reversed(self.points)]
        return "M" + " L".join(above + below) + " Z"


class Span(NamedTuple):
    """The env steps of one phase."""

    phase: str
    start: float
    width: float


@dataclass(frozen=True)
class Chart:
    curves: Sequence[Curve]
    spans: Sequence[Span]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]


def draw_chart(rows: Sequence[MetricsRow], metrics: Mapping[str, str], is_rate: bool) -> Chart:
    """Lay out the recorded ones of `metrics` (metric -> label) against env steps.

    is_rate: the axis goes from 0 to 100 %.
    """
    write = per_cent if is_rate else short
    if is_rate:
        y_axis = Axis(0, 1)
        y_ticks = [Tick(100 * share, per_cent(share)) for share in (0, 0.25, 0.5, 0.75, 1)]
    else:
        y_axis = _fit([row[metric] for row in rows for metric in metrics if metric in row])
        y_ticks = y_axis.ticks()
    env_steps = max((row["global_step"] for row in rows), default=0)
    x_axis = Axis(0, env_steps or 1)
    x_ticks = x_axis.ticks() if env_steps else [Tick(0, "0")]
    curves = []
    for metric, label in metrics.items():
        recorded = [row for row in rows if metric in row]
        if recorded:
            points = [_draw_point(row, metric, x_axis, y_axis) for row in recorded]
            curves.append(Curve(metric, label, write(recorded[-1][metric]), points))
    return Chart(curves, _draw_phases(rows, x_axis), x_ticks, y_ticks)


def _draw_point(row: MetricsRow, metric: str, x_axis: Axis, y_axis: Axis) -> Point:
    value = row[metric]
    return Point(
        x_axis.position(row["global_step"]),
        SIZE - y_axis.position(value),
        SIZE - y_axis.position(row.get(f"{metric}_high", value)),
        SIZE - y_axis.position(row.get(f"{metric}_low", value)),
    )


def _draw_phases(rows: Sequence[MetricsRow], x_axis: Axis) -> list[Span]:
    """The phases as spans; updates of the same phase are one span."""
    spans: list[Span] = []
    start = 0.0
    for row in rows:
        if "schedule/phase" in row:
            phase = list(Phase)[int(row["schedule/phase"])].value
            end = x_axis.position(row["global_step"])
            if spans and spans[-1].phase == phase:
                start = spans.pop().start
            spans.append(Span(phase, start, end - start))
            start = end
    return spans


def _fit(values: Sequence[float]) -> Axis:
    """An axis with room above and below the values; it begins at 0 if that costs little of the picture."""
    low = min(values, default=0)
    high = max(values, default=1)
    if 0 <= low <= SMALL * high:
        low = 0
    room = HEADROOM * (high - low) or 0.5 * abs(high) or 1
    return Axis(0 if low == 0 else low - room, high + room)


def per_cent(share: float) -> str:
    return f"{100 * share:.0f} %"


def short(value: float, digits: int = 3) -> str:
    """A number with three digits, or as many as given: 0.0214, 1.5k, 3e-05."""
    rounded = abs(float(f"{value:.{digits}g}"))
    if rounded >= 1e6:
        return f"{value / 1e6:.{digits}g}M"
    if rounded >= 1e3:
        return f"{value / 1e3:.{digits}g}k"
    return f"{value:.{digits}g}"
