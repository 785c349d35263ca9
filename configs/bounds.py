"""Check the values of settings against the types and bounds at their fields: `lr: PositiveFloat = 1e-6`."""

from __future__ import annotations

import functools
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, Field, ValidationError, create_model

from contracts import BadInput

POSITIVE = Field(gt=0)
NOT_NEGATIVE = Field(ge=0)
SHARE = Field(ge=0, le=1)
PositiveInt = Annotated[int, POSITIVE]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch's generators take 64 bits
PositiveFloat = Annotated[float, POSITIVE]
NonNegativeInt = Annotated[int, NOT_NEGATIVE]
NonNegativeFloat = Annotated[float, NOT_NEGATIVE]
Share = Annotated[float, SHARE]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


def check_fields(settings: object) -> None:
    """Raise BadInput, which names the flag, if a value in a dataclass is not of its field's type or bounds."""
    kind: type[Any] = type(settings)
    try:
        _model_of(kind).model_validate(vars(settings), strict=True)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as error:
        first = error.errors()[0]
        flag = f"--{first['loc'][0]}".replace("_", "-")
        raise BadInput(f"{flag}: {first['msg']}, got {first['input']}") from None


@functools.cache
def _model_of(kind: type[Any]) -> type[BaseModel]:
    """A pydantic model with the fields of a dataclass."""
    annotations = get_type_hints(kind, include_extras=True)
    fields: dict[str, Any] = {name: (annotation, ...) for name, annotation in annotations.items()}
    return create_model(kind.__name__, **fields)
