"""Read LeRobot datasets of version 3 without the package lerobot.

Numbers and PNG images are in Parquet files, videos in MP4 files. meta/info.json names the features. meta/episodes/ says
how long each episode is, and in which video and at which second it begins.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq

from contracts import BadInput, first_line, read_json, refuse_lfs_pointer
from workshop.stored_episode import StoredEpisode, choose_cameras, choose_feature, only_instruction

# Possible names of a feature: first lerobot's, then that of openpi's conversion.
STATES = ("observation.state", "state")
ACTIONS = ("action", "actions")
SUCCESS = ("next.success", "next.reward")  # above 0 in an env step of every episode that succeeds
ROWS_AT_ONCE = 64  # rows of a Parquet file that are read at once; they may hold images, which take memory

Row = dict[str, Any]  # a row of a Parquet file, by the names of its columns
Frames = Iterator[tuple[float, np.ndarray]]  # of a video: the time (s) and the image of each


def read_dataset(folder: Path, with_pictures: bool) -> Iterator[StoredEpisode]:
    """Yield the episodes of a dataset. Raises BadInput for other versions, missing features and damaged files."""
    info = read_json(folder / "meta" / "info.json")
    version = info.get("codebase_version")
    if (folder / "meta" / "tasks.jsonl").exists():
        version = "v2 (meta/tasks.jsonl)"  # whatever info.json says
    if not str(version).startswith("v3."):
        raise BadInput(
            f"{folder}: a LeRobot dataset of version {version}, expected v3: convert it by lerobot"
        )
    try:
        yield from _read_episodes(folder, info, with_pictures)
    except BadInput:
        raise
    except Exception as fault:  # damaged files can raise nearly any exception in pyarrow, av and here
        for path in sorted(folder.rglob("*.*")):
            refuse_lfs_pointer(path)
        reason = f"{type(fault).__name__}: {first_line(fault)}"
        raise BadInput(
            f"{folder}: no readable LeRobot dataset ({reason}): download the dataset again"
        ) from fault


def _read_episodes(folder: Path, info: Row, with_pictures: bool) -> Iterator[StoredEpisode]:
    """Yield the episodes. Raises ValueError, KeyError and others where the files contradict each other."""
    types = {name: feature["dtype"] for name, feature in info["features"].items()}
    state = choose_feature(types, STATES, str(folder))
    action = choose_feature(types, ACTIONS, str(folder))
    cameras = choose_cameras(types, str(folder))
    tasks = {row["task_index"]: _text_of(row) for row in _read_rows(folder, "meta/tasks.parquet")}
    success = next((name for name in SUCCESS if name in types), None)
    columns = ["episode_index", "task_index", "timestamp", state, action, *SUCCESS]
    if with_pictures:
        columns += [name for name in cameras if types[name] == "image"]
    videos: dict[Path, Frames] = {}  # the unread frames of each file
    for entry, rows in _read_tables(folder, info, columns):
        index = entry["episode_index"]
        pictures: list[Sequence[bytes | np.ndarray]] = []
        for camera in cameras if with_pictures else ():
            if types[camera] == "image":
                pictures.append([_read_picture(folder, row[camera]) for row in rows])
                continue
            path = folder / _video_path(info, camera, entry)
            frames = videos.setdefault(path, _decode_frames(path))
            times_s = [entry[f"videos/{camera}/from_timestamp"] + row["timestamp"] for row in rows]
            pictures.append(_next_frames(frames, times_s, 0.5 / info["fps"], f"{path}, episode {index}"))
        location = f"{folder}, episode {index}"
        yield StoredEpisode(
            location=location,
            pictures=list(zip(*pictures, strict=True)),
            proprio=np.array([row[state] for row in rows], np.float32),
            actions=np.array([row[action] for row in rows], np.float32),
            instruction=only_instruction((tasks[row["task_index"]] for row in rows), location),
            success=None if success is None else any(np.any(np.array(row[success]) > 0) for row in rows),
        )


def _read_tables(folder: Path, info: Row, columns: list[str]) -> Iterator[tuple[Row, list[Row]]]:
    """Yield what meta/episodes/ says of each episode, and its rows. Raises ValueError if some are missing."""
    entries = {row["episode_index"]: row for row in _read_rows(folder, "meta/episodes/*/*.parquet")}
    num_episodes = 0
    all_rows = _read_rows(folder, "data/*/*.parquet", columns)
    for index, group in groupby(all_rows, itemgetter("episode_index")):
        rows = list(group)
        entry = entries.get(index, {"length": 0})
        if len(rows) != entry["length"]:
            raise ValueError(f"episode {index} has {len(rows)} of {entry['length']} rows")
        yield entry, rows
        num_episodes += 1
    if num_episodes != info["total_episodes"]:
        raise ValueError(f"it has {num_episodes} of {info['total_episodes']} episodes")


def _read_rows(folder: Path, pattern: str, columns: list[str] | None = None) -> Iterator[Row]:
    """Yield the rows of Parquet files, in the order of the files' names: those of `columns` that they have, or all."""
    for path in sorted(folder.glob(pattern)):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                yield from batch.to_pylist()


def _text_of(row: Row) -> str:
    """The instruction in a row of meta/tasks.parquet, whose column has different names: it is the one with text."""
    return next(value for value in row.values() if isinstance(value, str))


def _read_picture(folder: Path, cell: object) -> bytes:
    """The image file in a cell, or in the dataset's folder, if the cell only has its path there."""
    if not isinstance(cell, dict):
        raise BadInput(
            f"{folder}: pictures are not embedded: a cell holds {cell!r:.60}, expected the bytes of an image file or "
            "its path in this folder: convert the dataset"
        )
    return cell["bytes"] or (folder / cell["path"]).read_bytes()


def _video_path(info: Row, camera: str, entry: Row) -> str:
    """The video that holds an episode's pictures. pandas may have made the two indices floats."""
    return info["video_path"].format(
        video_key=camera,
        chunk_index=int(entry[f"videos/{camera}/chunk_index"]),
        file_index=int(entry[f"videos/{camera}/file_index"]),
    )


def _next_frames(
    frames: Frames, times_s: Sequence[float], tolerance_s: float, location: str
) -> list[np.ndarray]:
    """The images of the next episode in a video, [T] uint8 (H, W, 3) RGB. The video may hold more episodes.

    Frames are counted, and compared with the times that the tables say: neither alone shows that video and table have
    drifted apart. Raises BadInput if they differ by half a frame or more, ValueError if the video ends too early.
    """
    pictures: list[np.ndarray] = []
    for expected_s, (frame_s, picture) in zip(times_s, frames, strict=False):
        if not abs(frame_s - expected_s) < tolerance_s:  # `not` is also true for NaN
            raise BadInput(
                f"{location}: video and table have drifted apart: frame {len(pictures)} is at {frame_s:.3f} s, the "
                f"table says {expected_s:.3f} s: convert the dataset again, by a newer lerobot"
            )
        pictures.append(picture)
    if len(pictures) != len(times_s):
        raise ValueError(f"{location} has {len(pictures)} of {len(times_s)} frames")
    return pictures


def _decode_frames(path: Path) -> Frames:
    """Decode the frames of a video, one after the other."""
    with av.open(str(path)) as video:
        for frame in video.decode(video=0):
            yield frame.time, frame.to_ndarray(format="rgb24")
