"""HTML pages that need nothing but themselves: inline SVG that follows light and dark, no scripts, no network."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rl.evaluation import Successes
from rl.paired import Paired
from rl.panels import COLOURS, LIGHT, STYLE

SIZE = (4.9, 2.9)  # inches; a figure as wide as the page is WIDE
WIDE = (13.5, 4.0)
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Figure:
    svg: Markup
    reading: str
    shown: str = ""  # "wide" or "narrow": only on such screens


def figure(draw: Callable[[plt.Axes], None], reading: str, shown: str = "") -> Figure:
    """What `draw` puts on an axis, as inline SVG."""
    size = WIDE if shown == "wide" else SIZE
    with plt.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": reading + shown}):
        drawn, axis = plt.subplots(figsize=size, layout="constrained")
        draw(axis)
        file = io.StringIO()
        drawn.savefig(file, format="svg", transparent=True, metadata=NO_METADATA)
        plt.close(drawn)
    return Figure(inline_svg(file.getvalue()), reading, shown)


def main_figure(draw: Callable[[plt.Axes], None], reading: str) -> list[Figure]:
    """A figure as wide as the page, and as narrow as the others for a telephone."""
    return [figure(draw, reading, shown) for shown in ("wide", "narrow")]


def inline_svg(document: str) -> Markup:
    """The <svg> element of a drawing with CSS variables for its colours, as wide as there is room."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # numbered anew in every drawing: not unique in a page of several
    svg = re.sub(r"font: ([^;\"]*?)(?:'[^']*'|sans-serif)[^;\"]*", r"font: \1system-ui, sans-serif", svg)
    for name, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{name})")
    return Markup(svg)


def write_page(path: Path, template: str, **content: Any) -> Path:
    """Fill a template of rl/templates and write it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    html = environment.get_template(template).render(
        colours=COLOURS, rate=rate_cell, points=points, reading=reading, **content
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html)
    return path


def rate_cell(successes: Successes, column: str) -> Markup:
    """A table cell: k/n, rate, interval; a telephone shows the column's name beside it."""
    rate, interval = str(successes).split(" [")
    cell = '<td class="number" data-column="{}">{} <span class="interval">[{}</span></td>'
    return Markup(cell).format(column, rate, interval)


def points(paired: Paired) -> Markup:
    """A paired difference with its interval, and on how many episodes."""
    difference, interval = str(paired).split(" [")
    return Markup('{} <span class="interval">[{}, n = {}</span>').format(difference, interval, paired.n)


def reading(text: str) -> Markup:
    """A caption whose flags do not break."""
    parts = re.split(r"(--[a-z][a-z-]*)", text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if p.startswith("--") else p for p in parts)
