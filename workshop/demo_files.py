"""Write and read demonstrations: one `.npz` file per successful episode, by workshop.demos and for workshop.sft.

Beside the files lies recipe.json, the settings of the collection (workshop/demos.py), the suite among them.

The files are episode_{task_id:02d}_{index:06d}.npz, in NumPy's format without pickle. Each holds
  jpeg_bytes    uint8 (N,)              all JPEG files one after the other: frame by frame, camera by camera
  jpeg_offsets  int64 (F, cameras, 2)   for each JPEG file the index of its first byte, and that after its last byte
and the fields of `DemoEpisode` by their names, except `jpegs` and those that are None.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contracts import BadInput, first_line, replaced
from vla.images import decode_jpeg as decode_jpeg  # of the `jpegs`; outside programs import it here

RECIPE_FILE = "recipe.json"
KEY_SUFFIX = "_no_noops"  # of the statistics of demonstrations, after the name of their suite
CHUNK_LENGTH = 8  # actions that belong to a frame
LIBERO_SIZES = (7, 8)  # numbers in an action, numbers in the robot's state


@dataclass(frozen=True)
class DemoEpisode:
    """A successful episode. Action t is the expert's action, with its tremor, in the state after t executed actions."""

    # [F][cameras], agentview then wrist; images (256, 256, 3), upright like Observation.images
    jpegs: list[list[bytes]]
    proprio: np.ndarray  # (F, 8) float32, as Observation.proprio
    frame_steps: np.ndarray  # (F,) int64, ascending: number of actions executed before each frame
    # (T, 7) float32 in env units (gripper -1 open, 1 close), T >= last frame step + 8
    actions: np.ndarray
    instruction: str
    noise_scale: float
    env_steps: int  # until success
    looks: str  # the asset pack of the images: "official", "lowpoly" or a digest
    task_id: int | None = None  # None: not known

    def chunks(self) -> np.ndarray:
        """The actions of every frame's chunk, (F, 8, 7) float32: what a policy learns."""
        return self.actions[self.frame_steps[:, None] + np.arange(CHUNK_LENGTH)]


def episode_path(folder: Path, task_id: int, index: int) -> Path:
    return Path(folder) / f"episode_{task_id:02d}_{index:06d}.npz"


def list_episodes(folder: Path) -> list[Path]:
    """The episode files of a folder, sorted by task and index. Raises BadInput if there is none."""
    paths = sorted(Path(folder).glob("episode_*.npz"))
    if not paths:
        raise BadInput(
            f"{folder}: no demonstrations: expected episode_*.npz of workshop.demos, a LeRobot dataset or RLDS data "
            "(LIBERO's own: openvla/modified_libero_rlds/libero_spatial_no_noops); HDF5 files are not read"
        )
    return paths


def write_episode(path: Path, episode: DemoEpisode) -> None:
    """Write an episode's file, which is complete as soon as it exists. Equal episodes give equal bytes."""
    files = [jpeg for frame in episode.jpegs for jpeg in frame]
    lengths = [len(jpeg) for jpeg in files]
    ends = np.cumsum(lengths)
    offsets = np.stack([ends - lengths, ends], axis=-1).reshape(len(episode.jpegs), -1, 2)
    fields = {name: value for name, value in vars(episode).items() if value is not None}
    del fields["jpegs"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as draft, draft.open("wb") as file:
        jpeg_bytes = np.frombuffer(b"".join(files), np.uint8)
        np.savez(file, jpeg_bytes=jpeg_bytes, jpeg_offsets=offsets, **fields)


def read_episode(path: Path) -> DemoEpisode:
    """Read what `write_episode` wrote; nothing in the file is executed. Raises BadInput for a damaged file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            fields = {name: array if array.ndim else array.item() for name, array in stored.items()}
        jpeg_bytes = fields.pop("jpeg_bytes").tobytes()
        offsets = fields.pop("jpeg_offsets").tolist()
        jpegs = [[jpeg_bytes[start:end] for start, end in frame] for frame in offsets]
        return DemoEpisode(jpegs=jpegs, **fields)
    except Exception as fault:  # damaged files raise a dozen kinds of exceptions in NumPy, zipfile and zlib
        raise BadInput(
            f"{path}: no readable demonstration ({first_line(fault)}); delete it and collect it again"
        ) from fault
