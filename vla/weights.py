"""Tensors on disk: safetensors files and torch `.pt` state dicts. Nothing here can run code from a file.

A safetensors file is 8 bytes (length of the header, little endian), a JSON header {name: {dtype, shape, data_offsets}}
and the tensors' bytes. The header alone tells whether a file is whole and fits the network, so every file of a
checkpoint is checked before the first tensor is read.
"""

import hashlib
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from errors import BadInput
from untrusted.json_file import as_object, parse_json, read_json, required
from untrusted.plain_file import check_plain
from untrusted.torch_file import load_torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_FILE_NAME = re.compile(r"\w[\w.-]{0,200}", re.ASCII)  # of the same folder
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_SAMPLE_BYTES = 4096
# Bits of an element; dtypes of less than a byte pack several into one.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, as its header describes it."""

    path: Path
    name: str
    dtype: str  # "BF16", "F32", ...
    shape: tuple[int, ...]
    start: int  # byte offsets in the file
    end: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, by its index if it has one; not all need to exist."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [folder / SINGLE_FILE]
    weight_map = as_object(required(read_json(index), "weight_map", str(index)), f"{index}: weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    if not names or not all(_FILE_NAME.fullmatch(name) for name in names):
        raise BadInput(f"{index}: weight_map names no files of this folder; download it again")
    return [folder / name for name in names]


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """All tensors of a safetensors file by name, and its metadata. Raises BadInput when it is missing or not whole."""
    if not path.is_file():
        raise BadInput(f"{path} is missing: download the checkpoint again, or copy all of its files")
    size = check_plain(path)
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise BadInput(f"{path} is not a safetensors file (it begins with {start!r}): download it again")
            content = file.read(length).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not a safetensors file (unreadable header): download it again") from error
    header = as_object(parse_json(content, f"{path} (unreadable header)"), f"{path} (unreadable header)")
    metadata = as_object(header.pop("__metadata__", {}), f"{path}: __metadata__")
    try:
        tensors = {name: _stored_tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is not a safetensors file (unreadable header): download it again") from error
    expected = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if size != expected:
        raise BadInput(f"{path} is not whole: expected {expected} bytes, found {size}: download it again")
    if size != 8 + length + sum(tensor.end - tensor.start for tensor in tensors.values()):
        raise BadInput(f"{path} is not a safetensors file (its tensors overlap): download it again")
    return tensors, metadata


def _stored_tensor(path: Path, name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    """Raises ValueError, KeyError or TypeError for an entry whose numbers are no sizes or contradict each other."""
    start, end, *shape = (_size(number) for number in (*entry["data_offsets"], *entry["shape"]))
    if len(entry["data_offsets"]) != 2 or 8 * (end - start) != math.prod(shape) * _BITS[entry["dtype"]]:
        raise ValueError(f"offsets {start}, {end} for shape {shape} of {entry['dtype']}")
    return StoredTensor(path, name, entry["dtype"], tuple(shape), data_start + start, data_start + end)


def _size(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no size")
    return number


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in a safetensors file's header."""
    return read_header(path)[1]


def stream_tensors(
    tensors: Iterable[StoredTensor], device: torch.device, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) one at a time on `device`, converted to `dtype`; one file is open at a time."""
    by_path: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        by_path.setdefault(tensor.path, []).append(tensor)
    for path, entries in by_path.items():
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for entry in entries:
                    # On the CPU, safetensors gives a view of the mapped file: a copy must not follow the file's fate.
                    copy = device.type == "cpu"
                    tensor = file.get_tensor(entry.name)
                    check_finite(tensor, entry.name, path)
                    yield entry.name, tensor.to(dtype=dtype, copy=copy)
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{path} cannot be read ({error}): download it again") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a small safetensors file, on the CPU in their stored dtype."""
    entries, _ = read_header(path)
    return dict(stream_tensors(entries.values(), torch.device("cpu")))


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """One safetensors file, readable for everyone (the library makes it private to its owner). Raises OSError."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata={"format": "pt"} | (metadata or {}))
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    path.chmod(0o644)


def read_pt(path: Path) -> dict[str, Tensor]:
    """A `.pt` state dict on the CPU, without the prefix `module.` that distributed training adds to names.

    Raises BadInput; a pickle that wants to call anything but tensor constructors is refused, not run.
    """
    state = load_torch(path)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise BadInput(f"{path} holds no state dict of tensors: get it from its source again")
    if not all(value.is_floating_point() for value in state.values()):
        raise BadInput(f"{path} holds tensors of other than floating-point numbers: get it from its source again")
    tensors = {str(key).removeprefix("module."): value for key, value in state.items()}
    for name, tensor in tensors.items():
        check_finite(tensor, name, path)
    return tensors


def check_finite(tensor: Tensor, name: str, path: Path) -> None:
    """Raise BadInput when a stored tensor holds NaN or infinity: one such number spoils everything that is computed."""
    if not tensor.is_floating_point():
        return
    # Their sum is not finite either then; it takes no memory beside the tensor and half the time of a look at each.
    if not tensor.sum(dtype=torch.float32).isfinite() and not torch.isfinite(tensor).all():
        raise BadInput(
            f"{path}: tensor {name} holds NaN or infinity: the file is damaged or its training has diverged; get it "
            "from its source again, or take another checkpoint"
        )


def fingerprint(tensors: Iterable[StoredTensor]) -> str:
    """A hash of a checkpoint's weights that is the same however they are spread over files.

    It covers every tensor's name, dtype and shape, and the first, middle and last 4 KiB of its bytes: enough to tell
    checkpoints apart, because training changes nearly all of a tensor's values, and fast for 15 GB.
    """
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
        last = max(tensor.start, tensor.end - _SAMPLE_BYTES)
        with tensor.path.open("rb") as file:
            for position in (tensor.start, (tensor.start + last) // 2, last):
                file.seek(position)
                digest.update(file.read(min(_SAMPLE_BYTES, tensor.end - position)))
    return digest.hexdigest()
