"""Demonstrations on disk: one `.npz` file per successful episode, written by envs.demos and read by vla.sft.

episode_{task_id:02d}_{index:06d}.npz, numpy's format without pickle
  jpeg_bytes    uint8 (N,)              all JPEG files one after the other: frame by frame, camera by camera
  jpeg_offsets  int64 (F, cameras, 2)   first byte of each, and the byte after its last
  proprio       float32 (F, 8)          eef position (m), axis-angle, gripper joint positions
  frame_steps   int64 (F,)              env step of each frame: the number of actions executed before it
  actions       float32 (T, 7)          the expert's actions, in the env's units (gripper -1 open, +1 close)
  objects       float32 (F, 6)          position of the object to move and of its target (m)
  task_id, init_state_id, instruction, noise_scale, env_steps    one value each
"""

import dataclasses
import io
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from errors import BadInput
from untrusted.archives import read_npz

CHUNK_LENGTH = 8  # actions that belong to a frame: T >= frame_steps[-1] + CHUNK_LENGTH
ACTION_DIM = 7
PROPRIO_DIM = 8
OBJECTS_DIM = 6
LARGEST_SIDE = 4096  # pixels of a frame


@dataclass(frozen=True)
class DemoEpisode:
    """A successful episode. Action t is the expert's answer to the state after t executed (noisy) actions."""

    task_id: int
    init_state_id: int
    instruction: str
    noise_scale: float
    jpegs: list[list[bytes]]  # [F][cameras], agentview then wrist; (256, 256, 3), upright as Observation.images
    proprio: np.ndarray  # (F, 8) float32
    frame_steps: np.ndarray  # (F,) int64, ascending
    actions: np.ndarray  # (T, 7) float32: T >= frame_steps[-1] + CHUNK_LENGTH, longer than the episode itself
    objects: np.ndarray  # (F, 6) float32
    env_steps: int  # until success

    def __post_init__(self) -> None:
        frames = len(self.jpegs)
        if not frames or len({len(cameras) for cameras in self.jpegs}) != 1 or not self.jpegs[0]:
            raise ValueError("an episode needs frames, all of them with the same cameras")
        _check_array("proprio", self.proprio, np.float32, (frames, PROPRIO_DIM))
        _check_array("frame_steps", self.frame_steps, np.int64, (frames,))
        _check_array("actions", self.actions, np.float32, (len(self.actions), ACTION_DIM))
        _check_array("objects", self.objects, np.float32, (frames, OBJECTS_DIM))
        if self.frame_steps[0] < 0 or (np.diff(self.frame_steps) <= 0).any():
            raise ValueError("frame_steps must ascend from 0 or more")
        if len(self.actions) < self.frame_steps[-1] + CHUNK_LENGTH:
            raise ValueError(
                f"{len(self.actions)} actions are no chunk for the frame of env step {self.frame_steps[-1]}"
            )


def _check_array(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, not {np.dtype(dtype)} {shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds numbers that are not finite")


def episode_path(folder: Path, task_id: int, index: int) -> Path:
    return Path(folder) / f"episode_{task_id:02d}_{index:06d}.npz"


def list_episodes(folder: Path) -> list[Path]:
    """The episode files of a folder, sorted by task and index. Raises BadInput when there is none."""
    paths = sorted(Path(folder).glob("episode_*.npz"))
    if not paths:
        raise BadInput(f"{folder}: no demonstrations (episode_*.npz); run: python -m envs.demos --out {folder}")
    return paths


def write_episode(path: Path, episode: DemoEpisode) -> None:
    """Write the file in one go: it is there as a whole or not at all. Equal episodes give equal bytes."""
    files = [jpeg for cameras in episode.jpegs for jpeg in cameras]
    ends = np.cumsum([len(jpeg) for jpeg in files])
    offsets = np.stack([ends - [len(jpeg) for jpeg in files], ends], axis=-1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            np.savez(
                file,
                jpeg_bytes=np.frombuffer(b"".join(files), np.uint8),
                jpeg_offsets=offsets.reshape(len(episode.jpegs), -1, 2).astype(np.int64),
                proprio=episode.proprio,
                frame_steps=episode.frame_steps,
                actions=episode.actions,
                objects=episode.objects,
                task_id=np.int64(episode.task_id),
                init_state_id=np.int64(episode.init_state_id),
                instruction=np.str_(episode.instruction),
                noise_scale=np.float64(episode.noise_scale),
                env_steps=np.int64(episode.env_steps),
            )
            file.close()
            os.chmod(file.name, 0o644)  # temporary files are private; demonstrations are as public as other files
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read_episode(path: Path) -> DemoEpisode:
    """Read what `write_episode` wrote; nothing in the file is executed. Raises BadInput for a broken file."""
    fields = read_npz(
        path,
        (
            *(field.name for field in dataclasses.fields(DemoEpisode) if field.name != "jpegs"),
            "jpeg_bytes",
            "jpeg_offsets",
        ),
    )
    try:
        return DemoEpisode(
            task_id=int(fields["task_id"]),
            init_state_id=int(fields["init_state_id"]),
            instruction=str(fields["instruction"]),
            noise_scale=float(fields["noise_scale"]),
            jpegs=_split_jpegs(fields["jpeg_bytes"], fields["jpeg_offsets"]),
            proprio=fields["proprio"],
            frame_steps=fields["frame_steps"],
            actions=fields["actions"],
            objects=fields["objects"],
            env_steps=int(fields["env_steps"]),
        )
    except (ValueError, TypeError, IndexError) as fault:
        raise BadInput(f"{path}: no readable demonstration ({fault}); delete the file and collect it again") from fault


def _split_jpegs(data: np.ndarray, offsets: np.ndarray) -> list[list[bytes]]:
    """The files lie one after the other: ranges that overlap would make GBs out of MBs."""
    if offsets.ndim != 3 or offsets.shape[2] != 2 or data.dtype != np.uint8 or offsets.dtype != np.int64:
        raise ValueError(f"jpeg_offsets {offsets.shape} do not fit {data.dtype} jpeg_bytes")
    ends = [0, *offsets[..., 1].flatten().tolist()]
    if offsets[..., 0].flatten().tolist() != ends[:-1] or ends != sorted(ends) or ends[-1] != len(data):
        raise ValueError(f"jpeg_offsets do not cut {len(data)} jpeg_bytes into files")
    stream = data.tobytes()
    return [[stream[start:end] for start, end in cameras] for cameras in offsets.tolist()]


def encode_jpeg(image: np.ndarray) -> bytes:
    """uint8 (H, W, 3) RGB -> JPEG, quality 95, chroma 4:2:0: what the training data of OpenVLA-OFT went through."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, subsampling="4:2:0")
    return file.getvalue()


def decode_jpeg(data: bytes) -> np.ndarray:
    """JPEG -> uint8 (H, W, 3) RGB, with the decoder of `vla.preprocessing.jpeg_round_trip`.

    So decode_jpeg(encode_jpeg(image)) == jpeg_round_trip(image): a frame read here has had its round trip.
    Raises BadInput for bytes that are no JPEG file, or one that unpacks to a giant.
    """
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        if max(height, width) > LARGEST_SIDE:
            raise ValueError(f"{height} x {width} pixels")
        return simplejpeg.decode_jpeg(data, colorspace="RGB", fastdct=True, fastupsample=False)
    except ValueError as fault:
        raise BadInput(f"a frame of a demonstration is no readable JPEG file: {fault}; collect it again") from fault
