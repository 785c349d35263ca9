"""Read LeRobot datasets of version 3 without the package lerobot.

Numbers and PNG images are in Parquet files, videos in MP4 files. meta/info.json names the features. meta/episodes/ says
how long each episode is, and in which video and at which second it begins.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq

from contracts import BadInput, first_line, read_json
from workshop.stored_episode import StoredEpisode, choose_cameras

# Possible names of a feature: first lerobot's, then that of openpi's conversion.
STATES = ("observation.state", "state")
ACTIONS = ("action", "actions")
# The columns that say where an episode is in a camera's videos.
VIDEO_PLACE = ("chunk_index", "file_index", "from_timestamp")
ROWS_AT_ONCE = 64  # rows of a Parquet file that are read at once; they may hold images, which take memory

Row = dict[str, Any]  # a row of a Parquet file, by the names of its columns


@dataclass(frozen=True)
class Dataset:
    """What meta/info.json says about a dataset."""

    folder: Path
    state: str  # name of the feature with the robot's states
    action: str  # name of the feature with the actions
    cameras: list[str]  # names of the features with images, agentview before wrist
    videos: list[str]  # the cameras whose images are in MP4 files
    video_path: str  # template of the path of a video
    fps: float  # env steps per second of video
    num_episodes: int


def read_dataset(folder: Path, with_pictures: bool) -> Iterator[StoredEpisode]:
    """Yield the episodes of a dataset. Raises BadInput for other versions, missing features and damaged files."""
    info = read_json(folder / "meta" / "info.json")
    version = info.get("codebase_version")
    if not str(version).startswith("v3."):
        raise BadInput(
            f"{folder}: a LeRobot dataset of codebase_version {version}, expected v3.0: convert it by a newer lerobot"
        )
    try:
        yield from _read_episodes(_parse_info(folder, info), with_pictures)
    except (AttributeError, LookupError, OSError, TypeError, ValueError, av.error.FFmpegError) as fault:
        reason = f"{type(fault).__name__}: {first_line(fault)}"
        raise BadInput(f"{folder}: no readable LeRobot dataset ({reason}): download it again") from fault


def _parse_info(folder: Path, info: Mapping[str, Any]) -> Dataset:
    features = info["features"]
    types = {name: feature["dtype"] for name, feature in features.items()}
    cameras = choose_cameras([name for name in types if types[name] in ("image", "video")], str(folder))
    return Dataset(
        folder=folder,
        state=_choose_feature(features, STATES, folder),
        action=_choose_feature(features, ACTIONS, folder),
        cameras=cameras,
        videos=[name for name in cameras if types[name] == "video"],
        video_path=info["video_path"],
        fps=info["fps"],
        num_episodes=info["total_episodes"],
    )


def _choose_feature(features: Iterable[str], names: Sequence[str], folder: Path) -> str:
    """The first of `names` that the dataset has. Raises BadInput if it has none."""
    for name in names:
        if name in features:
            return name
    raise BadInput(f"{folder}: no {' or '.join(names)} among its features: {', '.join(features)}")


def _read_episodes(dataset: Dataset, with_pictures: bool) -> Iterator[StoredEpisode]:
    """Yield the episodes. Raises ValueError, KeyError and others where the files contradict each other."""
    entries = _read_entries(dataset)
    instructions = _read_instructions(dataset.folder)
    columns = ["episode_index", "task_index", dataset.state, dataset.action]
    if with_pictures:
        columns += [name for name in dataset.cameras if name not in dataset.videos]
    all_rows = _read_rows(dataset.folder.glob("data/*/*.parquet"), columns)
    num_episodes = 0
    for index, group in groupby(all_rows, itemgetter("episode_index")):
        rows = list(group)
        entry = entries[index]
        if len(rows) != entry["length"]:
            raise ValueError(f"episode {index} has {len(rows)} of {entry['length']} rows")
        yield StoredEpisode(
            location=f"{dataset.folder}, episode {index}",
            pictures=_read_pictures(dataset, entry, rows) if with_pictures else [],
            proprio=np.array([row[dataset.state] for row in rows], np.float32),
            actions=np.array([row[dataset.action] for row in rows], np.float32),
            instruction=instructions[rows[0]["task_index"]],
        )
        num_episodes += 1
    if num_episodes != dataset.num_episodes:
        raise ValueError(f"it has {num_episodes} of {dataset.num_episodes} episodes")


def _read_entries(dataset: Dataset) -> dict[int, Row]:
    """The entry of each episode in meta/episodes/: its length, and its place in the videos of each camera."""
    columns = ["episode_index", "length"]
    for camera in dataset.videos:
        columns += [f"videos/{camera}/{field}" for field in VIDEO_PLACE]
    entries = _read_rows(dataset.folder.glob("meta/episodes/*/*.parquet"), columns)
    return {entry["episode_index"]: entry for entry in entries}


def _read_instructions(folder: Path) -> dict[int, str]:
    """The instruction of each task, by its index.

    The instruction's column has different names, because it is the index of a pandas frame. It is the one with text.
    """
    instructions = {}
    for row in _read_rows([folder / "meta" / "tasks.parquet"], None):
        texts = [value for value in row.values() if isinstance(value, str)]
        instructions[row["task_index"]] = texts[0]
    return instructions


def _read_pictures(dataset: Dataset, entry: Row, rows: Sequence[Row]) -> list[list[bytes | np.ndarray]]:
    """The images of an episode, [T][cameras]: PNG files from the rows, or decoded uint8 (H, W, 3) from the videos."""
    by_camera: list[list[bytes] | list[np.ndarray]] = []
    for camera in dataset.cameras:
        if camera in dataset.videos:
            by_camera.append(_decode_video(dataset, camera, entry))
        else:
            by_camera.append([row[camera]["bytes"] for row in rows])
    return [list(pictures) for pictures in zip(*by_camera, strict=True)]


def _read_rows(paths: Iterable[Path], columns: list[str] | None) -> Iterator[Row]:
    """Yield the rows of Parquet files, in the order of the files' names. `columns` None means all columns.

    Raises ValueError if a file lacks one of the columns.
    """
    for path in sorted(paths):
        with pq.ParquetFile(path) as file:
            missing = set(columns or ()) - set(file.schema_arrow.names)
            if missing:
                raise ValueError(f"{path.name} has no {', '.join(sorted(missing))}")
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                yield from batch.to_pylist()


def _decode_video(dataset: Dataset, camera: str, entry: Row) -> list[np.ndarray]:
    """Decode the images of one episode, [T] uint8 (H, W, 3) RGB, from a video that holds other episodes, too.

    Raises ValueError if the video ends too early.
    """
    chunk_index, file_index, start_s = (entry[f"videos/{camera}/{field}"] for field in VIDEO_PLACE)
    file_name = dataset.video_path.format(video_key=camera, chunk_index=chunk_index, file_index=file_index)
    path = dataset.folder / file_name
    length = entry["length"]
    pictures: list[np.ndarray] = []
    with av.open(str(path)) as video:
        stream = video.streams.video[0]
        assert stream.time_base is not None, "every stream of a file has a time base"
        video.seek(int(start_s / stream.time_base), stream=stream)  # to the key frame at or before the start
        for frame in video.decode(stream):
            step = round((frame.time - start_s) * dataset.fps)  # of the episode; negative before it begins
            if step == len(pictures):
                pictures.append(frame.to_ndarray(format="rgb24"))
            if len(pictures) == length:
                return pictures
    raise ValueError(
        f"{path.name} has {len(pictures)} of {length} frames of episode {entry['episode_index']}"
    )
