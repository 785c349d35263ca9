"""What every section of a configuration checks itself by."""

from errors import BadInput


def require(condition: bool, message: str) -> None:
    """Raise BadInput unless `condition` holds."""
    if not condition:
        raise BadInput(message)
