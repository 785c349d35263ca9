"""Read LIBERO's benchmark initial states without running what is inside the file.

The `.pruned_init` files are numpy arrays that were written by `torch.save`: a zip archive whose `data.pkl` is a pickle.
torch >= 2.6 refuses to load it in its safe mode, and a plain unpickler would execute anything. The unpickler below
knows the four names that a pickled array consists of and nothing else, and has records in their place: numpy's own
functions trust what a pickle tells them.
"""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from errors import BadInput
from untrusted.archives import named_in_pickle, read_pickle

MAX_BYTES = 100_000_000  # LIBERO's largest has 44 KB
REPAIR = "reinstall hf-libero==0.1.4"


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """Stand-in for `_codecs.encode`, by which protocol 2 spells bytes; the original would accept any codec."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec {encoding!r} has no place in a numpy array")
    return text.encode("latin1")


class _Dtype:
    """Stand-in for `numpy.dtype`."""

    def __init__(self, name: str, align: bool, copy: bool):
        self.name, self.byte_order = name, None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byte_order = state[1]


class _Array:
    """Stand-in for `numpy.core.multiarray._reconstruct`, which makes an empty array, and for the array itself."""

    def __init__(self, kind: type, shape: tuple[int, ...], typecode: bytes):
        self.content: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, data = state
        if (dtype.name, dtype.byte_order) != ("f8", "<") or is_fortran is not False:
            raise pickle.UnpicklingError("it holds no float64 array")
        self.content = np.frombuffer(data, "<f8").reshape(shape).copy()


_ARRAY_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # numpy 2
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin1_bytes,
}
# What the stand-ins and the unpickler itself raise for a pickle that fits none of them.
_DAMAGED = (
    pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ARRAY_NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a numpy array")
        return _ARRAY_NAMES[module, name]


def load_init_states(path: Path) -> np.ndarray:
    """Initial states (num_states, 1 + nq + nv) float64: time, qpos and qvel of the simulation, one state per row.

    Raises BadInput for a missing file and for one that holds anything but such an array.
    """
    if not path.exists():
        raise BadInput(f"initial states not found: {path} does not exist; {REPAIR}")
    content = read_pickle(path, "/data.pkl", MAX_BYTES)
    try:
        named_in_pickle(content)
        loaded = _ArrayUnpickler(io.BytesIO(content)).load()
    except _DAMAGED as fault:
        raise BadInput(f"initial states unreadable: {path}: {fault}; {REPAIR}") from None
    states = loaded.content if isinstance(loaded, _Array) else None
    if states is None or states.ndim != 2 or not states.size:
        raise BadInput(f"initial states unreadable: {path} holds no 2-D float64 array; {REPAIR}")
    if not np.isfinite(states).all():
        raise BadInput(f"initial states unreadable: {path} holds numbers that are not finite; {REPAIR}")
    return states


def save_init_states(path: Path, states: np.ndarray) -> None:
    """Write initial states (num_states, 1 + nq + nv) as LIBERO's own files are written, whole or not at all."""
    import torch  # only here: what runs a simulation does without

    draft = path.with_name(f".{path.name}.tmp")
    torch.save(np.ascontiguousarray(states, dtype=np.float64), draft)
    os.replace(draft, path)
