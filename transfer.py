"""Old name of vla.preprocessing.send (deleted when the rooms have moved)."""
from vla.preprocessing import send  # noqa: F401
