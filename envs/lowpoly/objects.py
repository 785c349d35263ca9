"""What each object looks like, by `looks.json`: a list of parts for each body, or the name of a look in `fitted`.

Colours in `looks.json` are names of its `colors`, or numbers. A new object needs its facts in `facts.json`; without an
entry in `looks.json` it is drawn as plain boxes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.lowpoly.facts import AssetFile, Body, Look, collision_shapes, plain_look
from envs.lowpoly.fitted import FITTED_LOOKS
from envs.lowpoly.shapes import Color, Shape, box, cylinder, lathe, ring, tube

LOOKS = json.loads(Path(__file__).with_name("looks.json").read_text(encoding="utf-8"))
COLORS: Mapping[str, Color] = {name: tuple(color) for name, color in LOOKS["colors"].items()}
MAKERS: Mapping[str, Callable[..., Shape]] = {
    "box": box,
    "lathe": lathe,
    "cylinder": cylinder,
    "ring": ring,
    "tube": tube,
}


def object_look(file: AssetFile) -> Look:
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
    """A value of looks.json with the names of colours replaced by numbers, and lists by tuples."""
    if isinstance(value, list):
        return tuple(_with_colors(item) for item in value)
    if isinstance(value, dict):
        return {key: _with_colors(item) for key, item in value.items()}
    return COLORS.get(value, value)


def drawn(parts: Sequence[Mapping[str, Any]], body: Body | None = None) -> list[Shape]:
    """The shapes of parts of looks.json. `body` may be None for a background, which has no collision boxes to draw.

    A part is a maker with its arguments, or "own_boxes": collision boxes of the body. `times` repeats a box in a row,
    `along_y` metres apart.
    """
    shapes: list[Shape] = []
    for part in parts:
        part = _with_colors(part)
        if part["make"] == "own_boxes":
            assert body is not None, "a background has no boxes of its own"
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
    """The arguments of a part, once or for each of a row of boxes."""
    rows = [part["args"]]
    for i in range(1, part.get("times", 1)):
        rows.append([(x, y + i * part["along_y"], z) for x, y, z in part["args"]])
    return rows
