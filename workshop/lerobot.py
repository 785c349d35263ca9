"""LeRobot datasets of version 3, without lerobot: numbers and PNG pictures in Parquet files, videos in MP4 files.

meta/info.json names the features; meta/episodes/ says how long each episode is and where in which video it begins.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq

from contracts import BadInput, first_line, read_json
from workshop.foreign_demos import StoredEpisode, choose_cameras

STATES, ACTIONS = ("observation.state", "state"), ("action", "actions")  # by lerobot, and as openpi converts
ROWS_AT_ONCE = 64  # of a Parquet file: pictures in them take memory


def read_dataset(folder: Path, with_pictures: bool) -> Iterator[StoredEpisode]:
    """Its episodes one after the other. Raises BadInput for other versions, missing features and damaged files."""
    info = read_json(folder / "meta" / "info.json")
    if not str(info.get("codebase_version")).startswith("v3."):
        found = f"codebase_version {info.get('codebase_version')}"
        raise BadInput(
            f"{folder}: a LeRobot dataset of {found}, expected v3.0: convert it by a current lerobot"
        )
    try:
        yield from _read(folder, info, with_pictures)
    except (AttributeError, LookupError, OSError, TypeError, ValueError, av.error.FFmpegError) as fault:
        reason = f"{type(fault).__name__}: {first_line(fault)}"
        raise BadInput(f"{folder}: no readable LeRobot dataset ({reason}): get it anew") from fault


def _read(folder: Path, info: dict[str, Any], with_pictures: bool) -> Iterator[StoredEpisode]:
    features, fps = info["features"], info["fps"]
    state, action = (_feature(features, names, folder) for names in (STATES, ACTIONS))
    cameras = choose_cameras(
        [name for name in features if features[name]["dtype"] in ("image", "video")], str(folder)
    )
    videos = [name for name in cameras if features[name]["dtype"] == "video"]
    places = [
        f"videos/{name}/{field}"
        for name in videos
        for field in ("chunk_index", "file_index", "from_timestamp")
    ]
    entries = _rows(folder.glob("meta/episodes/*/*.parquet"), ["episode_index", "length", *places])
    episodes = {entry["episode_index"]: entry for entry in entries}
    texts = _rows(
        [folder / "meta" / "tasks.parquet"], None
    )  # the text is pandas's index, under changing names
    tasks = {row["task_index"]: next(text for text in row.values() if isinstance(text, str)) for row in texts}
    columns = ["episode_index", "task_index", state, action]
    columns += [name for name in cameras if with_pictures and name not in videos]
    num_found = 0
    for index, group in groupby(
        _rows(folder.glob("data/*/*.parquet"), columns), lambda row: row["episode_index"]
    ):
        rows, entry, where = list(group), episodes[index], f"{folder}, episode {index}"
        if len(rows) != entry["length"]:
            raise ValueError(f"episode {index} has {len(rows)} of {entry['length']} rows")
        decoded = {
            name: _decode(folder, info["video_path"], name, entry, fps) for name in videos if with_pictures
        }
        pictures = [
            [decoded[name][step] if name in videos else row[name]["bytes"] for name in cameras]
            for step, row in enumerate(rows)
            if with_pictures
        ]
        proprio, actions = (np.array([row[name] for row in rows], np.float32) for name in (state, action))
        yield StoredEpisode(where, pictures, proprio, actions, tasks[rows[0]["task_index"]])
        num_found += 1
    if num_found != info["total_episodes"]:
        raise ValueError(f"{num_found} of {info['total_episodes']} episodes are there")


def _feature(features: dict[str, Any], names: Sequence[str], folder: Path) -> str:
    if not (found := [name for name in names if name in features]):
        raise BadInput(f"{folder}: no {' or '.join(names)} among its features: {', '.join(features)}")
    return found[0]


def _rows(paths: Any, columns: list[str] | None) -> Iterator[dict[str, Any]]:
    """The rows of Parquet files in the order of their names."""
    for path in sorted(paths):
        with pq.ParquetFile(path) as file:
            if missing := set(columns or ()) - {*file.schema_arrow.names}:
                raise ValueError(f"{path.name} has no {', '.join(sorted(missing))}")
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                yield from batch.to_pylist()


def _decode(folder: Path, template: str, camera: str, entry: dict[str, Any], fps: float) -> list[np.ndarray]:
    """The pictures of an episode, [T] uint8 (H, W, 3) RGB, from a video that holds others as well."""
    chunk, number, start_s = (
        entry[f"videos/{camera}/{f}"] for f in ("chunk_index", "file_index", "from_timestamp")
    )
    path = folder / template.format(video_key=camera, chunk_index=chunk, file_index=number)
    pictures: list[np.ndarray] = []
    with av.open(str(path)) as video:
        stream = video.streams.video[0]
        assert stream.time_base is not None, "of every stream in a file"
        video.seek(int(start_s / stream.time_base), stream=stream)  # to the key frame at or before it
        for frame in video.decode(stream):
            place = round((frame.time - start_s) * fps)  # in the episode
            if place == len(pictures):
                pictures.append(frame.to_ndarray(format="rgb24"))
            if len(pictures) == entry["length"]:
                return pictures
    raise ValueError(
        f"{path.name} has {len(pictures)} of {entry['length']} frames of episode {entry['episode_index']}"
    )
