"""Zip archives that somebody else may have made: numpy's .npz and torch's .pt files. Nothing in them is executed.

A deflated MB can unpack to a GB, and the header of an array can claim any shape. So no member is unpacked beyond a
limit, and an array has exactly the bytes that its header says.
"""

import math
import pickletools
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from errors import BadInput
from untrusted.plain_file import check_plain

MAX_NPZ_BYTES = 1 << 28  # unpacked, of all members that are read
# What numpy writes before plain numbers and texts. Its own reader evaluates the header as a Python literal.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|][biufU]\d{1,6})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,12},? ?)*)\), \}\s*\n",
    re.DOTALL,
)
# What zipfile raises for archives that are damaged, encrypted or packed by unknown methods.
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
)


def read_npz(path: Path, names: Sequence[str], most: int = MAX_NPZ_BYTES) -> dict[str, np.ndarray]:
    """These arrays of an .npz file, numbers or texts. Raises BadInput when one is missing or the file is damaged."""
    check_plain(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: _member(archive, f"{name}.npy", most) for name in names}
            return {name: _array(archive.read(member)) for name, member in members.items()}
    except _UNREADABLE as error:
        raise BadInput(f"{path}: is no readable .npz file ({error}); restore it") from error


def _member(archive: zipfile.ZipFile, name: str, most: int) -> zipfile.ZipInfo:
    """A member that unpacks to less than `most` bytes. zipfile never unpacks more than the directory says."""
    member = archive.getinfo(name)
    if member.file_size > most or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} would unpack to {member.file_size:,} bytes")
    return member


def _array(content: bytes) -> np.ndarray:
    header = _NPY.match(content)
    if header is None:
        raise ValueError(f"no array of numbers or texts, but {content[:60]!r}")
    dtype, shape = np.dtype(header[1].decode()), tuple(int(size) for size in re.findall(rb"\d+", header[3]))
    expected, found = math.prod(shape) * dtype.itemsize, len(content) - header.end()
    if expected != found:
        raise ValueError(f"an array of shape {shape} has {expected:,} bytes, found {found:,}")
    return np.ndarray(shape, dtype, bytearray(content[header.end() :]), order="F" if header[2] == b"True" else "C")


def read_pickle(path: Path, suffix: str, most: int) -> bytes:
    """The only member of an archive whose name ends so, not unpickled. Raises BadInput."""
    check_plain(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(suffix)]
            if len(names) != 1:
                raise ValueError(f"{len(names)} members are called {suffix}")
            return archive.read(_member(archive, names[0], most))
    except _UNREADABLE as error:
        raise BadInput(f"{path}: is no readable archive of torch ({error})") from error


def check_stored(path: Path) -> None:
    """Raises BadInput unless all members are stored as they are: then an archive unpacks to no more than its size."""
    size = check_plain(path)
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [member.filename for member in archive.infolist() if member.compress_type != zipfile.ZIP_STORED]
            unpacked = sum(member.file_size for member in archive.infolist())
    except _UNREADABLE as error:
        raise BadInput(f"{path}: is no readable archive of torch ({error})") from error
    if packed or unpacked > size:
        raise BadInput(f"{path}: is no archive as torch writes it: {unpacked:,} bytes in a file of {size:,}")


def named_in_pickle(content: bytes) -> set[str]:
    """What a pickle would import, "module.name"; nothing is imported. Raises ValueError for what torch never writes.

    Unpickling makes room for the largest number that the memo is used with, so that has to be looked at before.
    """
    named = set()
    for instruction, argument, _ in pickletools.genops(content):
        if instruction.name == "GLOBAL":
            named.add(str(argument).replace(" ", "."))
        elif instruction.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise ValueError(f"memo number {argument} in a pickle of {len(content)} bytes")
        elif instruction.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            raise ValueError(f"the instruction {instruction.name} is none that torch writes")
    return named
