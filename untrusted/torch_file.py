"""Files of torch.save that somebody else may have made: state dicts, training states. Nothing in them is executed."""

import pickle
import re
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import BadInput
from untrusted.archives import check_stored, named_in_pickle, read_pickle

# Tensors and plain values need no more. torch's own list of what is harmless also has what allocates without limit
# (bytearray) and kinds of tensors that no state dict of ours holds (sparse, quantised, without data).
_NAMES = re.compile(
    r"torch\.\w+Storage|torch\.storage\.\w+Storage|torch\._utils\._rebuild_(tensor_v2|parameter)|collections\.OrderedDict"
)
_MAX_PICKLE_BYTES = 50_000_000  # names and shapes of the tensors, not their values
# torch's unpickler is a machine of stacks and dictionaries that trusts its instructions.
_DAMAGED = (
    pickle.UnpicklingError, struct.error, ArithmeticError, AssertionError, AttributeError, EOFError, LookupError,
    OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def load_torch(path: Path) -> Any:
    """What torch.save wrote, tensors on the CPU. Raises BadInput for anything but plain tensors and values.

    Every tensor has as many values as it claims: a shape of 10^12 over one stored number is refused.
    """
    check_stored(path)
    content = read_pickle(path, "data.pkl", _MAX_PICKLE_BYTES)
    try:
        strange = sorted(name for name in named_in_pickle(content) if not _NAMES.fullmatch(name))
        if strange:
            raise ValueError(f"it names {', '.join(strange)}")
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except _DAMAGED as error:
        raise BadInput(
            f"{path} holds more or less than plain tensors and was not loaded ({type(error).__name__}: {error})"
        ) from error
    _check_sizes(path, loaded)
    return loaded


def _check_sizes(path: Path, loaded: Any) -> None:
    waiting, seen = [loaded], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if value.numel() * value.itemsize > value.untyped_storage().nbytes():
                raise BadInput(f"{path}: a tensor claims the shape {tuple(value.shape)}, which its file does not hold")
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += [*value.keys(), *value.values()] if isinstance(value, dict) else value
