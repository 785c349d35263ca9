"""Read RLDS folders such as openvla/modified_libero_rlds without TensorFlow.

Each record of a TFRecord file is an episode. A record is the length of its data (8 bytes), a checksum of the length
(4), the data, and a checksum of the data (4). The data are a message tf.train.Example: names, each with a list of
bytes, floats or integers for all steps of the episode. Checksums are not compared. A file that was cut short, or is no
TFRecord file, is recognised by a length that reaches beyond the file's end.
"""

import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from contracts import BadInput, first_line, refuse_lfs_pointer
from workshop.stored_episode import StoredEpisode, choose_cameras, choose_feature, only_instruction

INSTRUCTION = "steps/language_instruction"
STATE = "steps/observation/state"
ACTION = "steps/action"
REWARD = "steps/reward"
# Field numbers of tf.train.Feature. Field 3, a list of integers, is not needed.
BYTES_LIST = 1
FLOAT_LIST = 2
WITH_LENGTH = 2  # the wire type of all fields of tf.train.Example, as TensorFlow writes it

Feature = list[memoryview] | np.ndarray  # bytes; float32 (N,)


def read_dataset(folder: Path, with_pictures: bool) -> Iterator[StoredEpisode]:
    """Yield the episodes of all splits of a dataset. Raises BadInput for missing features and damaged files."""
    paths = sorted(folder.glob("*.tfrecord*"))
    _check_all_files(folder, paths)
    for path in paths:
        try:
            for record_index, record in enumerate(read_records(path)):
                yield _episode(parse_example(record), f"{path}, record {record_index}", with_pictures)
        except (LookupError, OSError, ValueError, struct.error) as fault:
            refuse_lfs_pointer(path)
            raise BadInput(
                f"{path}: no readable TFRecord file ({first_line(fault)}): download it again"
            ) from fault


def _check_all_files(folder: Path, paths: Sequence[Path]) -> None:
    """Raise BadInput if files named NAME-00000-of-00032 lack some of their 32 siblings."""
    counts = Counter(re.sub(r"-\d+-of-", "-*-of-", path.name) for path in paths)
    for name, num_present in counts.items():
        *_, total = name.rpartition("-*-of-")
        if "-*-of-" in name and not total.isdecimal():
            stray = next(path for path in paths if path.name.endswith(total))
            raise BadInput(f"{stray} is no file of a dataset, but what a download may leave: remove it")
        num_files = int(total) if "-*-of-" in name else 1
        if num_present != num_files:
            raise BadInput(f"{folder}: {num_present} of {num_files} files {name}: download the others")


def _episode(example: dict[str, Feature], location: str, with_pictures: bool) -> StoredEpisode:
    """Make an episode of a record's features. Raises BadInput if one is missing, ValueError for wrong lengths."""
    for name in (INSTRUCTION, STATE, ACTION):
        choose_feature(example, [name], location)
    num_steps = len(example[INSTRUCTION])
    cameras = choose_cameras(example, location)
    pictures = []
    if with_pictures:
        pictures = [[bytes(example[name][step]) for name in cameras] for step in range(num_steps)]
    rewards = example.get(REWARD)
    return StoredEpisode(
        location=location,
        pictures=pictures,
        proprio=np.array(example[STATE], np.float32).reshape(num_steps, -1),
        actions=np.array(example[ACTION], np.float32).reshape(num_steps, -1),
        instruction=only_instruction((bytes(text).decode() for text in example[INSTRUCTION]), location),
        success=None if rewards is None else bool(np.any(np.array(rewards) > 0)),
    )


def read_records(path: Path) -> Iterator[memoryview]:
    """Yield the data of every record. Raises ValueError if the file ends too early.

    The file is mapped into memory, so parts that nobody uses are never read from disk.
    """
    data = np.memmap(path, np.uint8, "r").data
    start = 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + length
        if end + 4 > len(data):
            raise ValueError(f"it ends {end + 4 - len(data)} bytes too early")
        yield data[start + 12 : end]
        start = end + 4


def parse_example(record: memoryview) -> dict[str, Feature]:
    """The features of a tf.train.Example by name; lists of integers are left out, because nobody needs them."""
    example: dict[str, Feature] = {}
    for _, features in _fields(record):
        for _, entry in _fields(features):  # an entry of a map has field 1, the key, and field 2, the value
            key, feature = dict(_fields(entry)).values()
            for kind, values in _fields(feature):
                items = [item for _, item in _fields(values)]
                if kind == BYTES_LIST:
                    example[bytes(key).decode()] = items
                elif kind == FLOAT_LIST:
                    example[bytes(key).decode()] = np.frombuffer(b"".join(items), "<f4")
    return example


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (field number, content) of every field of a protobuf message. Raises ValueError for other messages."""
    start = 0
    while start < len(message):
        tag, start = _varint(message, start)
        length, start = _varint(message, start)
        end = start + length
        if tag & 7 != WITH_LENGTH or end > len(message):
            raise ValueError("this is no tf.train.Example")
        yield tag >> 3, message[start:end]
        start = end


def _varint(message: memoryview, start: int) -> tuple[int, int]:
    """Decode the integer at `start`: seven bits a byte, the lowest first; the top bit says that another byte follows.

    Returns the integer and the index after its end.
    """
    value = 0
    shift = 0
    while message[start] >= 128:
        value |= (message[start] & 127) << shift
        shift += 7
        start += 1
    return value | message[start] << shift, start + 1
