"""Make the looks of objects from `looks.json`, which has a list of parts for each body or names a look in `fitted`.

A colour in `looks.json` is a name from its `colors`, or a list of numbers. To add an object, add its facts to
`facts.json`. An object without an entry in `looks.json` is drawn as plain boxes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workshop.lowpoly.facts import AssetFile, Body, Look, collision_shapes, plain_look
from workshop.lowpoly.fitted import FITTED_LOOKS
from workshop.lowpoly.shapes import Color, Shape, box, cylinder, lathe, ring, tube

LOOKS = json.loads(Path(__file__).with_name("looks.json").read_text(encoding="utf-8"))
COLORS: Mapping[str, Color] = {name: tuple(color) for name, color in LOOKS["colors"].items()}
SHAPES: Sequence[Callable[..., Shape]] = (box, lathe, cylinder, ring, tube)
MAKERS = {make.__name__: make for make in SHAPES}  # by the names that looks.json uses


def object_look(file: AssetFile) -> Look:
    """The look of an object: as `looks.json` says, else plain boxes."""
    if file.name not in LOOKS["objects"]:
        return plain_look(file)
    entry = _with_colors(LOOKS["objects"][file.name])
    if "bodies" in entry:
        shapes = {name: drawn(parts, file.body[name]) for name, parts in entry["bodies"].items()}
        return Look(shapes, entry.get("paint", {}))
    (body,) = [body for body in file.body.values() if body.collision_boxes]
    fit = FITTED_LOOKS[entry.pop("look")]
    return Look({body.name: fit(body, **entry)})


def _with_colors(value: Any) -> Any:
    """A value of looks.json with names of colours replaced by their numbers, and lists by tuples."""
    if isinstance(value, list):
        return tuple(_with_colors(item) for item in value)
    if isinstance(value, dict):
        return {key: _with_colors(item) for key, item in value.items()}
    return COLORS.get(value, value)


def drawn(parts: Sequence[Mapping[str, Any]], body: Body | None = None) -> list[Shape]:
    """Make the shapes of a list of parts from looks.json.

    A part names one of MAKERS with its arguments, or "own_boxes": collision boxes of the `body`. A background has no
    such boxes, so its `body` is None. `times` repeats a box in a row, `along_y` metres apart.
    """
    shapes: list[Shape] = []
    for part in parts:
        part = _with_colors(part)
        if part["make"] == "own_boxes":
            assert body is not None, "a background has no collision boxes"
            shapes += collision_shapes(body, part["color"], slice(*part["args"]))
            continue
        options = {"segments": part["segments"]} if "segments" in part else {}
        for arguments in _repeated(part):
            shape = MAKERS[part["make"]](*arguments, color=part["color"], **options)
            if "stretched" in part:
                shape = shape.stretched(part["stretched"])
            if "at" in part:
                shape = shape.placed(part["at"])
            shapes.append(shape)
    return shapes


def _repeated(part: Mapping[str, Any]) -> list[Any]:
    """The arguments of a part: one entry, or one for each box of a row."""
    rows = [part["args"]]
    for i in range(1, part.get("times", 1)):
        rows.append([(x, y + i * part["along_y"], z) for x, y, z in part["args"]])
    return rows
