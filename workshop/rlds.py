"""RLDS folders as of openvla/modified_libero_rlds, without TensorFlow: an episode is a record of a TFRecord file.

A record is a length (8 bytes), a checksum of it (4), the data, and a checksum of them (4). The data are a message
tf.train.Example: names and lists of bytes, floats or integers, here of all steps of the episode one after the other.
Checksums are not compared: a length beyond the file's end finds what is cut, or is none at all.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from contracts import BadInput, first_line
from workshop.foreign_demos import StoredEpisode, choose_cameras

TEXT, STATE, ACTION = "steps/language_instruction", "steps/observation/state", "steps/action"
PICTURE_STARTS = (b"\xff\xd8", b"\x89P")  # of JPEG and PNG files

Feature = list[memoryview] | np.ndarray  # bytes; float32 (N,)


def read_dataset(folder: Path, with_pictures: bool) -> Iterator[StoredEpisode]:
    """The episodes of all its splits one after the other. Raises BadInput for missing features and damaged files."""
    paths = sorted(folder.glob("*.tfrecord*"))
    for path in paths:
        if shard := re.search(r"(.*)-\d+-of-(\d+)$", path.name):
            found = sum(other.name.startswith(f"{shard[1]}-") for other in paths)
            if found != int(shard[2]):
                raise BadInput(
                    f"{folder}: {found} of {int(shard[2])} files {shard[1]}-*: download the others"
                )
        try:
            for number, record in enumerate(read_records(path)):
                yield _episode(parse_example(record), f"{path}, record {number}", with_pictures)
        except (LookupError, OSError, ValueError, struct.error) as fault:
            raise BadInput(f"{path}: no readable TFRecord file ({first_line(fault)}): get it anew") from fault


def _episode(example: dict[str, Feature], where: str, with_pictures: bool) -> StoredEpisode:
    if missing := {TEXT, STATE, ACTION} - example.keys():
        found = ", ".join(sorted(example))
        raise BadInput(
            f"{where}: no {', '.join(sorted(missing))} among its features: {found}: no RLDS data of LIBERO"
        )
    steps = len(example[TEXT])
    files = {name: values for name, values in example.items() if isinstance(values, list) and values}
    cameras = choose_cameras([name for name in files if bytes(files[name][0][:2]) in PICTURE_STARTS], where)
    if short := [name for name in cameras if len(example[name]) != steps]:
        raise ValueError(f"{len(example[short[0]])} of {steps} entries of {short[0]}")
    pictures = [[bytes(example[name][step]) for name in cameras] for step in range(steps) if with_pictures]
    proprio, actions = (np.array(example[name], np.float32).reshape(steps, -1) for name in (STATE, ACTION))
    return StoredEpisode(where, pictures, proprio, actions, bytes(example[TEXT][0]).decode())


def read_records(path: Path) -> Iterator[memoryview]:
    """The data of every record; the file is mapped, so what nobody looks at is not read."""
    data, start = np.memmap(path, np.uint8, "r").data, 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + length
        if end + 4 > len(data):
            raise ValueError(f"it ends {end + 4 - len(data)} bytes too early")
        yield data[start + 12 : end]
        start = end + 4


def parse_example(record: memoryview) -> dict[str, Feature]:
    """The features of a tf.train.Example by name, but for integers, which nothing here needs."""
    found: dict[str, Feature] = {}
    for _, features in _fields(record):
        for _, entry in _fields(features):
            key, feature = (value for _, value in sorted(_fields(entry), key=lambda field: field[0]))
            for kind, values in _fields(feature):  # one of three lists
                items = [
                    item for _, item in _fields(values)
                ]  # numbers: packed into one item, or each its own
                if kind == 1:
                    found[bytes(key).decode()] = items
                elif kind == 2:
                    found[bytes(key).decode()] = np.frombuffer(b"".join(items), "<f4")
    return found


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(number, content) of every field of a protobuf message; of a number, its bytes."""
    start = 0
    while start < len(message):
        tag, start = _varint(message, start)
        if tag & 7 == 2:  # bytes, a text, a message, packed numbers: the length first
            length, start = _varint(message, start)
            end = start + length
        elif tag & 7 == 0:
            end = _varint(message, start)[1]
        else:
            end = start + {1: 8, 5: 4}[tag & 7]
        if end > len(message):
            raise ValueError("a field that ends beyond its message")
        yield tag >> 3, message[start:end]
        start = end


def _varint(message: memoryview, start: int) -> tuple[int, int]:
    """(the number, where it ends): seven bits a byte, the lowest first, and a bit that says whether more follow."""
    value, shift = 0, 0
    while True:
        byte = message[start]
        value, shift, start = value | (byte & 127) << shift, shift + 7, start + 1
        if byte < 128:
            return value, start
