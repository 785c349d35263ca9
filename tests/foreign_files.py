"""LeRobot datasets and RLDS folders for tests, written as lerobot and TensorFlow Datasets write them."""

import io
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.demo_episodes import INSTRUCTIONS, raw_images
from workshop.demo_files import CHUNK_LENGTH, DemoEpisode, encode_jpeg

CAMERAS = ("image", "image2")  # of HuggingFaceVLA/libero: agentview, wrist
FPS = 10


@dataclass(frozen=True)
class Recording:
    """An episode of T env steps, a picture before each."""

    images: np.ndarray  # uint8 (T, 2, SIDE, SIDE, 3)
    proprio: np.ndarray  # (T, 8) float32
    actions: np.ndarray  # (T, 7) float32, gripper -1 open, +1 close
    instruction: str


def record(episode: int, steps: int = 18) -> Recording:
    """The gripper closes and opens; the fingers follow at 5 mm an env step."""
    rng = np.random.default_rng([episode, 3])
    actions = rng.uniform(-0.9, 0.9, (steps, 7)).astype(np.float32)
    actions[:, 6] = np.where((np.arange(steps) + episode) // 8 % 2, 1, -1)
    proprio, finger = rng.normal(size=(steps, 8)).astype(np.float32), 0.03
    for step in range(steps):
        proprio[step, 6:] = finger, -finger
        finger = float(np.clip(finger - 0.005 * actions[step, 6], 0, 0.04))
    return Recording(raw_images(episode, steps), proprio, actions, INSTRUCTIONS[episode % 2])


def as_our_own(recording: Recording) -> DemoEpisode:
    """With the frames that a foreign dataset has for training: those with a whole chunk after them."""
    frames = len(recording.actions) - CHUNK_LENGTH + 1
    return DemoEpisode(
        jpegs=[[encode_jpeg(image) for image in images] for images in recording.images[:frames]],
        proprio=recording.proprio[:frames],
        frame_steps=np.arange(frames),
        actions=recording.actions,
        task_id=0,
        init_state_id=-1,
        instruction=recording.instruction,
        noise_scale=0.0,
        env_steps=len(recording.actions),
    )


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def write_lerobot(
    folder: Path, recordings: list[Recording], video: bool = False, version: str = "v3.0"
) -> Path:
    """A dataset of one chunk: all episodes in one Parquet file, and in one video of each camera."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("av")
    keys = [f"observation.images.{camera}" for camera in CAMERAS]
    vectors = {"observation.state": [8], "action": [7], "episode_index": [1], "task_index": [1]}
    features = {name: {"dtype": "float32", "shape": shape} for name, shape in vectors.items()}
    features |= {key: {"dtype": "video" if video else "image", "shape": [64, 64, 3]} for key in keys}
    video_path = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    info = {"codebase_version": version, "fps": FPS, "total_episodes": len(recordings), "features": features}
    tasks = sorted({recording.instruction for recording in recordings})
    data, episodes, start = [], [], 0
    for index, recording in enumerate(recordings):
        steps = len(recording.actions)
        for step in range(steps):
            row = {
                "observation.state": recording.proprio[step].tolist(),
                "action": recording.actions[step].tolist(),
            }
            row |= {"episode_index": index, "task_index": tasks.index(recording.instruction)}
            if not video:
                row |= {
                    key: {"bytes": png(recording.images[step, i]), "path": None} for i, key in enumerate(keys)
                }
            data.append(row)
        place = {"chunk_index": 0, "file_index": 0, "from_timestamp": start / FPS}
        episodes.append({"episode_index": index, "length": steps})
        episodes[-1] |= {
            f"videos/{key}/{name}": value for key in keys for name, value in place.items() if video
        }
        start += steps
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "info.json").write_text(json.dumps(info | {"video_path": video_path}))
    rows_of_tasks = [{"task_index": index, "__index_level_0__": text} for index, text in enumerate(tasks)]
    for path, rows in (
        ("meta/tasks.parquet", rows_of_tasks),
        ("meta/episodes/chunk-000/file-000.parquet", episodes),
        ("data/chunk-000/file-000.parquet", data),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / path)
    for i, key in enumerate(keys if video else []):
        path = folder / video_path.format(video_key=key, chunk_index=0, file_index=0)
        path.parent.mkdir(parents=True)
        write_video(path, np.concatenate([recording.images[:, i] for recording in recordings]))
    return folder


def write_video(path: Path, images: np.ndarray) -> None:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as video:
        stream = video.add_stream("mpeg4", rate=FPS, options={"qmin": "1", "qmax": "1"})
        stream.width = stream.height = images.shape[1]
        stream.pix_fmt, stream.gop_size = "yuv420p", 4
        for image in images:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        video.mux(stream.encode())


def write_rlds(folder: Path, recordings: list[Recording], encode: object = png) -> Path:
    """One TFRecord file for each episode, encode: picture -> file. Returns the folder of the version."""
    folder = folder / "1.0.0"
    folder.mkdir(parents=True)
    for index, recording in enumerate(recordings):
        path = folder / f"libero-train.tfrecord-{index:05d}-of-{len(recordings):05d}"
        path.write_bytes(tfrecord(example(rlds_features(recording, encode))))
    return folder


def rlds_features(recording: Recording, encode: object = png) -> dict[str, list[bytes] | np.ndarray]:
    """An episode as TensorFlow Datasets flattens it: bytes, float32 or int64 of all steps."""
    steps = len(recording.actions)
    pictures = {
        f"steps/observation/{name}": [encode(image) for image in recording.images[:, i]]
        for i, name in enumerate(("image", "wrist_image"))
    }
    return pictures | {
        "episode_metadata/file_path": [b"demo.hdf5"],
        "steps/is_first": np.arange(steps) == 0,
        "steps/reward": np.zeros(steps, np.float32),
        "steps/observation/joint_state": np.zeros(7 * steps, np.float32),
        "steps/observation/state": recording.proprio.ravel(),
        "steps/action": recording.actions.ravel(),
        "steps/language_instruction": [recording.instruction.encode()] * steps,
    }


def example(features: dict[str, list[bytes] | np.ndarray]) -> bytes:
    """A message tf.train.Example."""
    entries = []
    for name, values in features.items():
        if isinstance(values, list):
            kind, content = 1, b"".join(_field(1, value) for value in values)
        elif values.dtype == np.float32:
            kind, content = 2, _field(1, values.astype("<f4").tobytes())
        else:
            kind, content = 3, _field(1, b"".join(_varint(int(value) % 2**64) for value in values))
        entries.append(_field(1, _field(1, name.encode()) + _field(2, _field(kind, content))))
    return _field(1, b"".join(entries))


def tfrecord(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + bytes(4) + data + bytes(4)  # nobody compares the checksums


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])
