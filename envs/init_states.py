"""Read LIBERO's benchmark initial states without running what is inside the file.

The `.pruned_init` files are numpy arrays that were written by `torch.save`: a zip archive whose `data.pkl` is a pickle.
torch >= 2.6 refuses to load it in its safe mode, and a plain unpickler would execute anything. The unpickler below
knows the four names that a pickled array consists of and nothing else.
"""

import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np

from errors import BadInput


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """Stand-in for `_codecs.encode`, by which protocol 2 spells bytes; the original would accept any codec."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec {encoding!r} has no place in a numpy array")
    return text.encode("latin1")


def _empty_array(subtype: type, shape: tuple[int, ...], typecode: bytes) -> np.ndarray:
    """Stand-in for numpy's `_reconstruct`: the unpickler fills the array through `__setstate__`."""
    return np.ndarray.__new__(np.ndarray, shape, typecode)  # type: ignore[arg-type]  # bytes, as numpy itself writes


_ARRAY_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,  # numpy 2
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1_bytes,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ARRAY_NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a numpy array")
        return _ARRAY_NAMES[module, name]


def load_init_states(path: Path) -> np.ndarray:
    """Initial states (num_states, 1 + nq + nv) float64: time, qpos and qvel of the simulation, one state per row.

    Raises BadInput for a missing file and for one that holds anything but such an array.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            states = _ArrayUnpickler(io.BytesIO(archive.read(member))).load()
    except FileNotFoundError:
        raise BadInput(f"initial states not found: {path} does not exist; reinstall hf-libero==0.1.4") from None
    except Exception as fault:  # a damaged pickle can raise nearly anything
        raise BadInput(f"initial states unreadable: {path}: {fault}; reinstall hf-libero==0.1.4") from None
    if not (isinstance(states, np.ndarray) and states.dtype == np.float64 and states.ndim == 2 and len(states)):
        raise BadInput(f"initial states unreadable: {path} holds no 2-D float64 array; reinstall hf-libero==0.1.4")
    if not np.isfinite(states).all():
        raise BadInput(
            f"initial states unreadable: {path} holds numbers that are not finite; reinstall hf-libero==0.1.4"
        )
    return states


def save_init_states(path: Path, states: np.ndarray) -> None:
    """Write initial states (num_states, 1 + nq + nv) as LIBERO's own files are written, whole or not at all."""
    import torch  # only here: what runs a simulation does without

    draft = path.with_name(f".{path.name}.tmp")
    torch.save(np.ascontiguousarray(states, dtype=np.float64), draft)
    os.replace(draft, path)
