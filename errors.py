"""Old name of contracts (deleted when the rooms have moved)."""
from contracts import BadInput, TimeIsUp  # noqa: F401
