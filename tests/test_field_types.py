"""Stored values are held against the types that a dataclass declares."""

from dataclasses import dataclass, fields
from typing import Literal

import pytest

from configs.config import SECTIONS, to_dict
from configs.field_types import check_types
from configs.presets import PRESETS


@dataclass
class Example:
    whole: int = 1
    real: float = 1.0
    text: str | None = None
    choice: Literal["a", "b"] = "a"
    pair: tuple[int, int] = (0, 1)
    many: tuple[float, ...] = ()
    table: dict[int, float] | None = None
    size: int | Literal["auto"] = "auto"
    flag: bool = False


@pytest.mark.parametrize(
    "values",
    [
        {}, {"whole": -3}, {"real": 2}, {"real": float("inf")}, {"text": "x"}, {"choice": "b"}, {"pair": [1, 2]},
        {"many": [1, 2.5]}, {"table": {1: 0.5}}, {"size": 4}, {"size": "auto"}, {"flag": True}, {"unknown": object()},
    ],
)  # fmt: skip
def test_values_of_the_declared_types_pass(values):
    check_types(Example, values)


@pytest.mark.parametrize(
    "values",
    [
        {"whole": 1.0}, {"whole": True}, {"whole": None}, {"whole": 2**63}, {"real": "1"}, {"real": float("nan")},
        {"real": False}, {"text": 1}, {"choice": "c"}, {"choice": ["a"]}, {"pair": [1]}, {"pair": [1, 2, 3]},
        {"pair": "12"}, {"many": ["x"]}, {"table": {"1": 0.5}}, {"table": []}, {"size": "many"}, {"flag": 1},
    ],
)  # fmt: skip
def test_values_of_other_types_are_named(values):
    (name,) = values
    with pytest.raises(TypeError, match=f"^{name} is .*, expected "):
        check_types(Example, values)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes(preset):
    for name, values in to_dict(PRESETS[preset]).items():
        check_types(SECTIONS[name], values)
        assert set(values) == {field.name for field in fields(SECTIONS[name])}
