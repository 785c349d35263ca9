"""Lay out the charts of the report page: values become positions in a picture of 1000 by 1000 units.

The template stretches the picture to any width and writes the labels as text of the page, so they stay readable on a
narrow screen. The page's style sheet gives the colours, also for dark screens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experiment.run_files import MetricsRow

SIZE = 1000
PHASES = ("warmup", "transition", "RL")  # by the metric schedule/phase
HEADROOM = 0.08  # share of the values' range that is left free above and below them
SMALL = 0.4  # the axis of positive values begins at 0 if the lowest is below this share of the highest
MAX_TICKS = 5  # of a logarithmic axis


class Tick(NamedTuple):
    position: float  # in per cent of the axis
    label: str


@dataclass(frozen=True)
class Axis:
    """A range of values that is drawn from one end of the picture to the other."""

    low: float
    high: float
    ticks: Sequence[Tick]
    is_log: bool = False

    def position(self, value: float) -> float:
        """Where a value lies between the two ends, from 0 to SIZE."""
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(SIZE * share, 1)


class Point(NamedTuple):
    x: float
    y: float  # counted downwards, as in SVG
    top: float  # of the interval, or y
    bottom: float
    text: str  # shown under the mouse


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


class _Sample(NamedTuple):
    """A recorded value with its interval, which is the value alone where none was recorded."""

    env_steps: float
    value: float
    low: float
    high: float


def draw_chart(
    rows: Sequence[MetricsRow],
    metrics: Mapping[str, str],
    *,
    log_scale: bool = False,
    is_rate: bool = False,
    end: float = 0,
) -> Chart:
    """Lay out the recorded ones of `metrics` (metric -> label) against env steps.

    log_scale: a logarithmic axis, on which values of 0 are left out; it is linear if all are. is_rate: the axis goes
    from 0 to 100 %. end: the last env step of the axis, if it is beyond the last recorded one.
    """
    recorded = {metric: _read_samples(rows, metric) for metric in metrics}
    values = [bound for samples in recorded.values() for _, _, *bounds in samples for bound in bounds]
    write = per_cent if is_rate else short
    if is_rate:
        y_axis = Axis(0, 1, [Tick(100 * share, per_cent(share)) for share in (0, 0.25, 0.5, 0.75, 1)])
    elif log_scale and max(values, default=0) > 0:
        y_axis = _fit_log([value for value in values if value > 0])
    else:
        y_axis = _fit(values)
    last_step = max([end, *(row["global_step"] for row in rows)])
    x_axis = Axis(0, last_step or 1, _ticks(0, last_step or 1))
    curves = []
    for metric, samples in recorded.items():
        shown = [sample for sample in samples if not y_axis.is_log or sample.value > 0]
        if shown:
            points = [_draw_point(sample, x_axis, y_axis, write(sample.value)) for sample in shown]
            curves.append(Curve(metric, metrics[metric], write(shown[-1].value), points))
    return Chart(curves, _draw_phases(rows, x_axis), x_axis.ticks, y_axis.ticks)


def _read_samples(rows: Sequence[MetricsRow], metric: str) -> list[_Sample]:
    """All values of a metric, from the rows that have it."""
    samples = []
    for row in rows:
        if metric in row:
            value = row[metric]
            low = row.get(f"{metric}_low", value)
            high = row.get(f"{metric}_high", value)
            samples.append(_Sample(row["global_step"], value, low, high))
    return samples


def _draw_point(sample: _Sample, x_axis: Axis, y_axis: Axis, value: str) -> Point:
    text = f"{sample.env_steps:,.0f} env steps: {value}"
    if sample.low < sample.high:
        text += f" [{100 * sample.low:.0f}, {100 * sample.high:.0f}]"
    return Point(
        x_axis.position(sample.env_steps),
        SIZE - y_axis.position(sample.value),
        SIZE - y_axis.position(sample.high),
        SIZE - y_axis.position(sample.low),
        text,
    )


def _draw_phases(rows: Sequence[MetricsRow], x_axis: Axis) -> list[Span]:
    """The phases as spans; updates of the same phase are one span."""
    spans: list[Span] = []
    start = 0.0
    for row in rows:
        if "schedule/phase" in row:
            phase = PHASES[int(row["schedule/phase"]) % len(PHASES)]
            end = x_axis.position(row["global_step"])
            if spans and spans[-1].phase == phase:
                start = spans.pop().start
            spans.append(Span(phase, start, end - start))
            start = end
    return spans


def _fit(values: Sequence[float]) -> Axis:
    """A linear axis with room above and below the values; it begins at 0 if that costs little of the picture."""
    low = min(values, default=0)
    high = max(values, default=1)
    if 0 <= low <= SMALL * high:
        low = 0
    room = HEADROOM * (high - low) or 0.5 * abs(high) or 1
    high += room
    low = 0 if low == 0 else low - room
    return Axis(low, high, _ticks(low, high))


def _ticks(low: float, high: float) -> list[Tick]:
    """Three to five round numbers between low and high."""
    rough_step = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough_step))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough_step)
    multiples = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [Tick(100 * (step * n - low) / (high - low), short(step * n)) for n in multiples]


def _fit_log(values: Sequence[float]) -> Axis:
    """A logarithmic axis from one of the numbers 1, 2, 5, 10, 20, 50 ... to another."""
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    round_numbers = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
    low = max(number for number in round_numbers if number <= min(values))
    high = min(number for number in round_numbers if number >= max(values) and number > low)
    labelled = [number for number in round_numbers if low <= number <= high]
    if len(labelled) > MAX_TICKS:
        powers = [10.0**decade for decade in decades if low <= 10.0**decade <= high]
        labelled = powers[:: math.ceil(len(powers) / MAX_TICKS)]
    ticks = [Tick(100 * math.log(number / low) / math.log(high / low), short(number)) for number in labelled]
    return Axis(low, high, ticks, is_log=True)


def per_cent(share: float) -> str:
    return f"{100 * share:.0f} %"


def short(value: float) -> str:
    """A number with three digits: 0.0214, 1.5k, 3e-05."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 1e3:
        return f"{value / 1e3:.3g}k"
    return f"{value:.3g}"
