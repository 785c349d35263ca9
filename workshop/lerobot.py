"""Read LeRobot datasets of version 3 without the package lerobot.

Numbers and PNG images are in Parquet files, videos in MP4 files. meta/info.json names the features. meta/episodes/ says
how long each episode is, and in which video and at which second it begins.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import av
import numpy as np
import pyarrow.parquet as pq
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from contracts import BadInput, first_line, read_fields, refuse_lfs_pointer
from workshop.stored_episode import StoredEpisode, choose_cameras

# Possible names of a feature: first lerobot's, then that of openpi's conversion.
STATES = ("observation.state", "state")
ACTIONS = ("action", "actions")
SUCCESS = "next.success"
# The columns that say where an episode is in a camera's videos.
VIDEO_PLACE = ("chunk_index", "file_index", "from_timestamp")
ROWS_AT_ONCE = 64  # rows of a Parquet file that are read at once; they may hold images, which take memory
REPAIR = "download the dataset again"

Row = dict[str, Any]  # a row of a Parquet file, by the names of its columns
Frames = Iterator[tuple[float, np.ndarray]]  # of a video: the time (s) and the image of each


class Info(TypedDict):
    """The fields of meta/info.json that are read."""

    codebase_version: str
    features: dict[str, dict[str, object]]
    fps: Annotated[float, Field(gt=0, le=1e4)]  # env steps per second of video
    total_episodes: int
    video_path: NotRequired[str | None]  # template of the path of a video


@dataclass(frozen=True)
class Dataset:
    """What meta/info.json says about a dataset, and how far its videos were read."""

    folder: Path
    info: Info
    cameras: list[str]  # names of the features with images, agentview before wrist
    videos: list[str]  # the cameras whose images are in MP4 files
    open_videos: dict[Path, Frames] = field(default_factory=dict)  # the unread frames of each file


def read_dataset(folder: Path, with_pictures: bool) -> Iterator[StoredEpisode]:
    """Yield the episodes of a dataset. Raises BadInput for other versions, missing features and damaged files."""
    info = read_fields(folder / "meta" / "info.json", Info, REPAIR)
    version = info["codebase_version"]
    if (folder / "meta" / "tasks.jsonl").exists():
        version = "v2 (meta/tasks.jsonl)"  # whatever info.json says
    if not version.startswith("v3."):
        raise BadInput(
            f"{folder}: a LeRobot dataset of version {version}, expected v3: convert it by lerobot"
        )
    types = {name: feature.get("dtype") for name, feature in info["features"].items()}
    cameras = choose_cameras([name for name in types if types[name] in ("image", "video")], str(folder))
    dataset = Dataset(folder, info, cameras, [name for name in cameras if types[name] == "video"])
    try:
        yield from _read_episodes(dataset, with_pictures)
    except BadInput:
        raise
    except Exception as fault:  # damaged files can raise nearly any exception in pyarrow, av and here
        for path in sorted(folder.rglob("*.*")):
            refuse_lfs_pointer(path)
        reason = f"{type(fault).__name__}: {first_line(fault)}"
        raise BadInput(f"{folder}: no readable LeRobot dataset ({reason}): {REPAIR}") from fault


def _choose_feature(dataset: Dataset, names: Sequence[str]) -> str:
    """The first of `names` that the dataset has. Raises BadInput if it has none."""
    features = dataset.info["features"]
    for name in names:
        if name in features:
            return name
    raise BadInput(
        f"{dataset.folder}: no {' or '.join(names)} among its features {', '.join(features)}: rename one of them"
    )


def _read_episodes(dataset: Dataset, with_pictures: bool) -> Iterator[StoredEpisode]:
    """Yield the episodes. Raises ValueError, KeyError and others where the files contradict each other."""
    state = _choose_feature(dataset, STATES)
    action = _choose_feature(dataset, ACTIONS)
    entries = {
        entry["episode_index"]: entry for entry in _read_rows(dataset.folder, "meta/episodes/*/*.parquet")
    }
    tasks = {row["task_index"]: _text_of(row) for row in _read_rows(dataset.folder, "meta/tasks.parquet")}
    columns = {"episode_index", "task_index", state, action}
    columns |= {name for name in (SUCCESS, "timestamp") if name in dataset.info["features"]}
    if with_pictures:
        columns |= {name for name in dataset.cameras if name not in dataset.videos}
    num_episodes = 0
    all_rows = _read_rows(dataset.folder, "data/*/*.parquet", columns)
    for index, group in groupby(all_rows, itemgetter("episode_index")):
        rows = list(group)
        entry = entries.get(index, {"length": 0})
        if len(rows) != entry["length"]:
            raise ValueError(f"episode {index} has {len(rows)} of {entry['length']} rows")
        yield StoredEpisode(
            location=f"{dataset.folder}, episode {index}",
            pictures=_read_pictures(dataset, entry, rows) if with_pictures else [],
            proprio=np.array([row[state] for row in rows], np.float32),
            actions=np.array([row[action] for row in rows], np.float32),
            instruction=tasks[rows[0]["task_index"]],
            success=any(np.any(row[SUCCESS]) for row in rows) if SUCCESS in columns else None,
        )
        num_episodes += 1
    if num_episodes != dataset.info["total_episodes"]:
        raise ValueError(f"it has {num_episodes} of {dataset.info['total_episodes']} episodes")


def _text_of(row: Row) -> str:
    """The instruction in a row of meta/tasks.parquet, whose column has different names: it is the one with text."""
    return next(value for value in row.values() if isinstance(value, str))


def _read_pictures(dataset: Dataset, entry: Row, rows: Sequence[Row]) -> list[Sequence[bytes | np.ndarray]]:
    """The images of an episode, [T][cameras]: PNG files from the rows, or decoded uint8 (H, W, 3) from the videos."""
    by_camera: list[Sequence[bytes | np.ndarray]] = []
    for camera in dataset.cameras:
        if camera in dataset.videos:
            by_camera.append(_next_frames(dataset, camera, entry, rows))
        else:
            by_camera.append([_read_picture(dataset.folder, row[camera]) for row in rows])
    return list(zip(*by_camera, strict=True))


def _read_picture(folder: Path, cell: object) -> bytes:
    """The image file in a cell, or in the dataset's folder, if the cell only has its path there."""
    values = cell if isinstance(cell, dict) else {}
    content = values.get("bytes")
    if isinstance(content, bytes):
        return content
    path = Path(values.get("path") or "/")
    if path.is_absolute() or ".." in path.parts:
        raise BadInput(
            f"{folder}: pictures are not embedded: a cell holds {cell!r:.60}, expected the bytes of an image file or "
            "its path in this folder: convert the dataset"
        )
    return (folder / path).read_bytes()


def _read_rows(folder: Path, pattern: str, columns: Iterable[str] | None = None) -> Iterator[Row]:
    """Yield the rows of Parquet files, in the order of the files' names; all columns, or some that must be there."""
    for path in sorted(folder.glob(pattern)):
        with pq.ParquetFile(path) as file:
            missing = set(columns or ()) - set(file.schema_arrow.names)
            if missing:
                raise ValueError(f"{path.name} has no {', '.join(sorted(missing))}")
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=None if columns is None else list(columns)):
                yield from batch.to_pylist()


def _next_frames(dataset: Dataset, camera: str, entry: Row, rows: Sequence[Row]) -> list[np.ndarray]:
    """The images of the next episode in a video, [T] uint8 (H, W, 3) RGB. The video may hold more episodes.

    Frames are counted, and compared with the times that the tables say: neither alone shows that video and table have
    drifted apart. Raises BadInput if they differ by half a frame or more, ValueError if the video ends too early.
    """
    index = entry["episode_index"]
    chunk_index, file_index, start_s = (entry[f"videos/{camera}/{column}"] for column in VIDEO_PLACE)
    # pandas may have made the two indices floats.
    place = {"video_key": camera, "chunk_index": int(chunk_index), "file_index": int(file_index)}
    path = dataset.folder / str(dataset.info.get("video_path")).format(**place)
    frames = dataset.open_videos.setdefault(path, _decode_frames(path))
    fps = dataset.info["fps"]
    pictures: list[np.ndarray] = []
    for row, (frame_s, picture) in zip(rows, frames, strict=False):
        expected_s = start_s + row["timestamp"]
        if not abs(frame_s - expected_s) < 0.5 / fps:  # `not` is also true for NaN
            raise BadInput(
                f"{path}: video and table have drifted apart: frame {len(pictures)} of episode {index} is at "
                f"{frame_s:.3f} s, the table says {expected_s:.3f} s: convert the dataset again, by a newer lerobot"
            )
        pictures.append(picture)
    if len(pictures) != len(rows):
        raise ValueError(f"{path.name} has {len(pictures)} of {len(rows)} frames of episode {index}")
    return pictures


def _decode_frames(path: Path) -> Frames:
    """Decode the frames of a video, one after the other."""
    with av.open(str(path)) as video:
        for frame in video.decode(video=0):
            yield frame.time, frame.to_ndarray(format="rgb24")
