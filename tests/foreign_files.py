"""LeRobot datasets and RLDS folders for tests, written as lerobot and TensorFlow Datasets write them."""

import io
import struct
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contracts import write_json
from tests.demo_episodes import INSTRUCTIONS, raw_images
from vla.images import encode_jpeg
from workshop.demo_files import CHUNK_LENGTH, DemoEpisode
from workshop.stored_episode import StoredEpisode

# The packages that read and write LeRobot's datasets (requirements-demos.txt)
av = pytest.importorskip("av")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

# Of HuggingFaceVLA/libero: agentview, wrist
CAMERA_KEYS = ["observation.images.image", "observation.images.image2"]
FPS = 10
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
Encode = Callable[[np.ndarray], bytes]  # picture -> file


def record(episode: int, steps: int = 18) -> StoredEpisode:
    """The gripper closes and opens; the fingers follow at 5 mm an env step."""
    rng = np.random.default_rng([episode, 3])
    actions = rng.uniform(-0.9, 0.9, (steps, 7)).astype(np.float32)
    actions[:, 6] = np.where((np.arange(steps) + episode) // 8 % 2, 1, -1)
    proprio = rng.normal(size=(steps, 8)).astype(np.float32)
    proprio[:, 3:6] = [np.pi, 0, 0] + 0.1 * proprio[:, 3:6]  # the hand points down
    finger = 0.03
    for step in range(steps):
        proprio[step, 6:] = finger, -finger
        finger = float(np.clip(finger - 0.005 * actions[step, 6], 0, 0.04))
    pictures = raw_images(episode, steps)
    return StoredEpisode("", pictures, proprio, actions, INSTRUCTIONS[episode % 2], success=True)


def as_our_own(recording: StoredEpisode) -> DemoEpisode:
    """The recording with the frames that a foreign dataset has for training: those with a whole chunk after them."""
    frames = len(recording.actions) - CHUNK_LENGTH + 1
    return DemoEpisode(
        jpegs=[[encode_jpeg(image) for image in images] for images in recording.pictures[:frames]],
        proprio=recording.proprio[:frames],
        frame_steps=np.arange(frames),
        actions=recording.actions,
        instruction=recording.instruction,
        noise_scale=0.0,
        env_steps=len(recording.actions),
        looks="official",
    )


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=0)
    return file.getvalue()


# LeRobot


def write_lerobot(folder: Path, recordings: list[StoredEpisode], video: bool = False) -> Path:
    """A dataset of version 3: all episodes in one Parquet file, and in one video of each camera."""
    tasks = [{"task_index": i, "__index_level_0__": text} for i, text in enumerate(INSTRUCTIONS)]
    steps = [_steps(recording, i, with_pictures=not video) for i, recording in enumerate(recordings)]
    write_parquet(folder / "meta/tasks.parquet", tasks)
    write_parquet(folder / "meta/episodes/chunk-000/file-000.parquet", _episodes(recordings))
    write_parquet(folder / "data/chunk-000/file-000.parquet", list(chain(*steps)))
    write_json(folder / "meta" / "info.json", _info(len(recordings), video))
    if video:
        for camera, key in enumerate(CAMERA_KEYS):
            images = np.concatenate([recording.pictures[:, camera] for recording in recordings])
            write_video(folder / VIDEO_PATH.format(video_key=key, chunk_index=0, file_index=0), images)
    return folder


def _info(num_episodes: int, video: bool) -> dict:
    numbers = ("observation.state", "action", "timestamp", "episode_index", "task_index", "next.success")
    features = {name: {"dtype": "float32"} for name in numbers}
    features |= {key: {"dtype": "video" if video else "image"} for key in CAMERA_KEYS}
    info = {"codebase_version": "v3.0", "fps": FPS, "total_episodes": num_episodes, "features": features}
    return info | {"video_path": VIDEO_PATH}


def _steps(recording: StoredEpisode, index: int, with_pictures: bool) -> list[dict]:
    last_step = len(recording.actions) - 1
    rows = [
        {
            "timestamp": step / FPS,
            "observation.state": recording.proprio[step].tolist(),
            "action": recording.actions[step].tolist(),
            "episode_index": index,
            "task_index": INSTRUCTIONS.index(recording.instruction),
            "next.success": recording.success and step == last_step,
        }
        for step in range(last_step + 1)
    ]
    if with_pictures:
        for row, images in zip(rows, recording.pictures, strict=True):
            files = ({"bytes": png(image), "path": None} for image in images)
            row |= zip(CAMERA_KEYS, files, strict=True)
    return rows


def _episodes(recordings: list[StoredEpisode]) -> list[dict]:
    lengths = [len(recording.actions) for recording in recordings]
    rows = []
    for index, length in enumerate(lengths):
        row = {"episode_index": index, "length": length}
        place = {"chunk_index": 0, "file_index": 0, "from_timestamp": sum(lengths[:index]) / FPS}
        for key in CAMERA_KEYS:
            row |= {f"videos/{key}/{name}": value for name, value in place.items()}
        rows.append(row)
    return rows


def write_parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_video(path: Path, images: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as video:
        stream = video.add_stream("mpeg4", rate=FPS, options={"qmin": "1", "qmax": "1"})
        stream.width = images.shape[2]
        stream.height = images.shape[1]
        stream.pix_fmt = "yuv420p"
        stream.gop_size = 4
        for image in images:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        video.mux(stream.encode())


# RLDS


def write_rlds(folder: Path, recordings: list[StoredEpisode], encode: Encode = png) -> Path:
    """One TFRecord file for each episode. Returns the folder of the version."""
    folder = folder / "1.0.0"
    folder.mkdir(parents=True)
    for index, recording in enumerate(recordings):
        path = folder / f"libero-train.tfrecord-{index:05d}-of-{len(recordings):05d}"
        path.write_bytes(tfrecord(example(rlds_features(recording, encode))))
    return folder


def rlds_features(recording: StoredEpisode, encode: Encode = png) -> dict[str, list[bytes] | np.ndarray]:
    """An episode as TensorFlow Datasets flattens it: bytes, float32 or int64 of all steps."""
    steps = len(recording.actions)
    return {
        "steps/observation/image": [encode(image) for image in recording.pictures[:, 0]],
        "steps/observation/wrist_image": [encode(image) for image in recording.pictures[:, 1]],
        "steps/is_first": np.arange(steps) == 0,
        "steps/reward": np.full(steps, recording.success, np.float32) * (np.arange(steps) == steps - 1),
        "steps/observation/state": recording.proprio.ravel(),
        "steps/action": recording.actions.ravel(),
        "steps/language_instruction": [recording.instruction.encode()] * steps,
    }


def example(features: dict[str, list[bytes] | np.ndarray]) -> bytes:
    """A protocol buffer message tf.train.Example."""
    entries = []
    for name, values in features.items():
        if isinstance(values, list):
            kind = 1  # bytes_list
            content = b"".join(_field(1, value) for value in values)
        elif values.dtype == np.float32:
            kind = 2  # float_list
            content = _field(1, values.astype("<f4").tobytes())
        else:
            kind = 3  # int64_list
            content = _field(1, b"".join(_varint(int(value) % 2**64) for value in values))
        feature = _field(kind, content)
        entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
    return _field(1, b"".join(entries))


def tfrecord(data: bytes) -> bytes:
    """A record of a TFRecord file. Its two checksums are zero, because nothing compares them."""
    return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)


def _field(tag: int, content: bytes) -> bytes:
    """A length-delimited field of a message."""
    return _varint(tag << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    low_bits = value & 127
    rest = value >> 7
    return bytes([low_bits | 128]) + _varint(rest) if rest else bytes([low_bits])
