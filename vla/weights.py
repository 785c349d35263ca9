"""Read and write tensors: safetensors files, single or in shards with an index, and torch `.pt` state dicts."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contracts import read_fields, refuse_lfs_pointer, undamaged

INDEX_FILE = "model.safetensors.index.json"
CPU = torch.device("cpu")
FINGERPRINT_BYTES = 4096  # how much `fingerprint` reads at the start, the middle and the end of every tensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, and what the file's header says about it."""

    path: Path
    name: str
    dtype: str  # "BF16", "F32", ...
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a checkpoint folder should have; some may be missing.

    As in transformers, a single file comes before an index with shards, which an earlier save may have left.
    """
    single = folder / "model.safetensors"
    index = folder / INDEX_FILE
    if single.is_file() or not index.is_file():
        return [single]
    weight_map = read_fields(index, dict[str, str], "download it again", part="weight_map")
    return [folder / name for name in sorted(set(weight_map.values()))]


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read a safetensors file's header: its tensors by name, and its metadata. Raises BadInput."""
    tensors = {}
    refuse_lfs_pointer(path)
    with undamaged(path), safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (the file is no dictionary)
            header = file.get_slice(name)
            tensors[name] = StoredTensor(path, name, header.get_dtype(), tuple(header.get_shape()))
        return tensors, file.metadata() or {}


def by_file(tensors: Iterable[StoredTensor]) -> dict[Path, list[StoredTensor]]:
    """Group tensors by their file, in the given order."""
    files: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        files.setdefault(tensor.path, []).append(tensor)
    return files


def stream_tensors(
    tensors: Iterable[StoredTensor], device: torch.device = CPU, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Read tensors one at a time. Yields (name, tensor on `device` in `dtype`, or as stored)."""
    for path, stored_tensors in by_file(tensors).items():
        with safe_open(path, framework="pt", device=str(device)) as file:
            for stored in stored_tensors:
                tensor = file.get_tensor(stored.name)
                # On the CPU, safetensors returns a view of the mapped file, which may change or disappear later.
                yield stored.name, tensor.to(dtype=dtype, copy=device.type == "cpu")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a small safetensors file to the CPU, in their stored dtype. Raises BadInput."""
    stored, _ = read_header(path)
    return dict(stream_tensors(stored.values()))


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write one safetensors file, readable for everyone (the library makes it private). Raises OSError."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path, metadata={"format": "pt"} | (metadata or {}))
    except SafetensorError as error:
        os_error = re.search(r"\(os error (\d+)\)", str(error))  # for example, a full disk
        if os_error is None:
            raise
        code = int(os_error[1])
        raise OSError(code, os.strerror(code), str(path)) from error
    path.chmod(0o644)


def read_pt(path: Path) -> dict[str, Tensor]:
    """Read a `.pt` state dict to the CPU, without the `module.` that distributed training adds. Raises BadInput."""
    refuse_lfs_pointer(path)
    with undamaged(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {key.removeprefix("module."): tensor for key, tensor in state.items()}


def write_pt(path: Path, state: dict[str, Tensor]) -> None:
    """Write a `.pt` state dict as openvla-oft's distributed training does: names begin with `module.`."""
    torch.save({f"module.{name}": tensor.detach().cpu() for name, tensor in state.items()}, path)


def fingerprint(tensors: Iterable[StoredTensor]) -> str:
    """Identify weights by a hash of every tensor's name, dtype, shape, and first, middle and last 4 KiB.

    It does not depend on how the tensors are distributed over files.
    """
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, "pt")) for path in by_file(tensors)}
        for tensor in tensors:
            digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
            # The tensor is mapped from its file; only the samples are read.
            digest.update(samples(files[tensor.path].get_tensor(tensor.name)))
    return digest.hexdigest()


def pt_fingerprint(path: Path | None) -> str:
    """The same of a `.pt` state dict; empty without a file. Raises BadInput."""
    if path is None:
        return ""
    digest = hashlib.sha256()
    for name, tensor in sorted(read_pt(path).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(samples(tensor))
    return digest.hexdigest()


def samples(tensor: Tensor) -> bytes:
    """The first, middle and last 4 KiB of a tensor."""
    content = tensor.flatten().view(torch.uint8)
    last = max(0, len(content) - FINGERPRINT_BYTES)
    parts = [content[start : start + FINGERPRINT_BYTES] for start in (0, last // 2, last)]
    return torch.cat(parts).numpy().tobytes()
