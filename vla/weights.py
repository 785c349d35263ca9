"""Tensors on disk: safetensors files, whole or in shards with an index, and torch `.pt` state dicts."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contracts import BadInput, first_line, read_json

INDEX_FILE = "model.safetensors.index.json"
CPU = torch.device("cpu")


class StoredTensor(NamedTuple):
    path: Path
    name: str
    dtype: str  # "BF16", "F32", ...
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, by its index if it has one; not all need to exist."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [folder / "model.safetensors"]
    return [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """All tensors of a safetensors file by name, and its metadata. Raises BadInput when it is missing or not whole."""
    if not path.is_file():
        raise BadInput(f"{path} is missing: download the checkpoint again, or copy all of its files")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
            tensors = {
                k: StoredTensor(path, k, s.get_dtype(), tuple(s.get_shape())) for k, s in slices.items()
            }
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is not a whole safetensors file ({error}): download it again") from error


def by_file(tensors: Iterable[StoredTensor]) -> dict[Path, list[StoredTensor]]:
    found: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.path, []).append(tensor)
    return found


def stream_tensors(
    tensors: Iterable[StoredTensor], device: torch.device = CPU, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) one at a time on `device`, converted to `dtype`; one file is open at a time."""
    for path, entries in by_file(tensors).items():
        with safe_open(path, framework="pt", device=str(device)) as file:
            for entry in entries:
                tensor = file.get_tensor(entry.name)
                _check_finite(tensor, entry.name, path)
                # On the CPU, safetensors gives a view of the mapped file: a copy must not follow the file's fate.
                yield entry.name, tensor.to(dtype=dtype, copy=device.type == "cpu")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a small safetensors file, on the CPU in their stored dtype."""
    return dict(stream_tensors(read_header(path)[0].values()))


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """One safetensors file, readable for everyone (the library makes it private to its owner). Raises OSError."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata={"format": "pt"} | (metadata or {}))
    except SafetensorError as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):  # such as a full disk
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
        raise
    path.chmod(0o644)


def read_pt(path: Path) -> dict[str, Tensor]:
    """A `.pt` state dict on the CPU, without the prefix `module.` that distributed training adds to names."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        tensors: dict[str, Tensor] = {key.removeprefix("module."): tensor for key, tensor in state.items()}
    except Exception as error:  # torch has half a dozen kinds for files that are damaged or something else
        raise BadInput(
            f"{path} is no file of tensors ({first_line(error)}): get it from its source again"
        ) from error
    for name, tensor in tensors.items():
        _check_finite(tensor, name, path)
    return tensors


def write_pt(path: Path, state: dict[str, Tensor]) -> None:
    """A `.pt` state dict as openvla-oft's distributed training writes it: names begin with `module.`."""
    torch.save({f"module.{name}": tensor.detach().cpu() for name, tensor in state.items()}, path)


def _check_finite(tensor: Tensor, name: str, path: Path) -> None:
    # The sum takes no memory beside the tensor and half the time of a look at each number.
    if not tensor.sum(dtype=torch.float32).isfinite() and not torch.isfinite(tensor).all():
        raise BadInput(
            f"{path}: tensor {name} holds NaN or infinity: get it from its source again, or take another"
        )


def fingerprint(tensors: Iterable[StoredTensor]) -> str:
    """A hash of every tensor's name, dtype, shape and first, middle and last 4 KiB, however spread over files."""
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, "pt")) for path in by_file(tensors)}
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
            content = (
                files[tensor.path].get_tensor(tensor.name).flatten().view(torch.uint8)
            )  # mapped, not read
            last = max(0, len(content) - 4096)
            for start in (0, last // 2, last):
                digest.update(content[start : start + 4096].numpy().tobytes())
    return digest.hexdigest()
