"""Convert demonstrations of other programs to `DemoEpisode`s: LeRobot v3 datasets (lerobot.py), RLDS folders (rlds.py).

Datasets do not say which value of the gripper's command closes it, whether states have finger joints in metres, and
whether actions are those of LIBERO's env. The numbers have to show it, or the dataset is refused: the fingers' motion
after a command shows which value closes, for example. Numbers cannot tell which way up images are. They are taken as
upright, which means LIBERO's own renderings turned by 180 degrees. They are so in openvla's RLDS data and in what was
made from them (`lerobot/libero`, `HuggingFaceVLA/libero`). For other datasets `flip` turns the images.
"""

import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from huggingface_hub import HfApi, snapshot_download
from PIL import Image

from contracts import BadInput, first_line
from vla.hub import HUB_TIMEOUT_S, announce_hub
from vla.images import encode_jpeg
from workshop import rlds
from workshop.demo_files import CHUNK_LENGTH, DemoEpisode
from workshop.sft_config import Flip
from workshop.stored_episode import StoredEpisode, check_contents, moving_steps

# Name of a flip -> strides of the image's rows and columns.
STRIDES = {"none": (1, 1), "both": (-1, -1), "horizontal": (1, -1), "vertical": (-1, 1)}
FINGER_STEPS = 5  # after so many env steps of one gripper command the fingers show its effect
LEAST_FINGER_MOTION_M = 1e-4  # the mean motions after the two commands must differ by at least so much
HUB_DATASET = r"([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)"  # owner/name, and perhaps a folder in it
VERSION = r"\d+\.\d+\.\d+"


def find_demos(folder_or_hub_id: str | Path) -> tuple[Path, str]:
    """The folder that holds a dataset's files, and the dataset's name ("" for demonstrations of workshop.demos).

    A hub id is owner/name or owner/name/folder; its dataset is downloaded. Raises BadInput if there is no such dataset,
    or if the folder holds several.
    """
    path = Path(folder_or_hub_id).expanduser()
    root = path
    hub_id = re.fullmatch(HUB_DATASET, str(folder_or_hub_id))
    if not root.is_dir() and hub_id:
        announce_hub("--demos", path)
        root = _download(hub_id[1], hub_id[2].strip("/"))
    record_folders = sorted({file.parent for file in root.rglob("*.tfrecord*")})
    if len(record_folders) > 1:
        names = ", ".join(str(folder.relative_to(root)) for folder in record_folders)
        raise BadInput(
            f"--demos {folder_or_hub_id} holds several RLDS datasets: name one of its folders: {names}"
        )
    folder = record_folders[0] if record_folders else root
    if not is_foreign(folder):
        return folder, ""
    # The dataset's name is the last folder in the path that is not a version, such as 1.0.0.
    parts = [*path.resolve().parts, *folder.relative_to(root).parts]
    names_in_path = [part for part in parts if not re.fullmatch(VERSION, part)]
    return folder, names_in_path[-1]


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a LeRobot dataset or holds TFRecord files."""
    return _is_lerobot(folder) or any(folder.glob("*.tfrecord*"))


def _is_lerobot(folder: Path) -> bool:
    return (folder / "meta" / "info.json").exists()


def _download(repo: str, subfolder: str) -> Path:
    """Download a dataset of the hub, or take it from the hub's cache if there is no network; returns its folder.

    Raises BadInput if neither has it.
    """
    patterns = [f"{subfolder}/*"] if subfolder else None
    try:
        # First ask with a timeout, because snapshot_download waits forever where a network drops packets.
        HfApi().dataset_info(repo, timeout=HUB_TIMEOUT_S)
        is_offline = False
    except Exception:  # the hub's library raises errors of several HTTP libraries
        is_offline = True
    try:
        snapshot = snapshot_download(
            repo, repo_type="dataset", allow_patterns=patterns, local_files_only=is_offline
        )
    except Exception as error:
        raise BadInput(
            f"--demos {repo}: no such folder, and no dataset of the hub or its cache ({type(error).__name__}): check "
            f"name and network, or collect demonstrations: python -m workshop.demos --out {repo}"
        ) from error
    return Path(snapshot, subfolder)


def _read_stored(folder: Path, with_pictures: bool) -> Iterator[StoredEpisode]:
    """Yield the episodes of a dataset of either kind. Raises BadInput if it cannot be read."""
    if not _is_lerobot(folder):
        return rlds.read_dataset(folder, with_pictures)
    try:
        # Import it only now, because the packages that it needs are optional (requirements-demos.txt).
        from workshop import lerobot
    except ModuleNotFoundError as missing:
        raise BadInput(
            f"{folder}: a LeRobot dataset is read by the package {missing.name}; run: "
            "pip install -r requirements-demos.txt"
        ) from None
    return lerobot.read_dataset(folder, with_pictures)


@dataclass
class GripperSurvey:
    """The gripper's commands in a dataset, and how the fingers moved after them."""

    commands: set[float] = field(default_factory=set)  # as stored
    # For each command: changes of the distance between the fingers (m) over FINGER_STEPS env steps of that command.
    distance_changes: defaultdict[float, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, episode: StoredEpisode) -> None:
        """Add an episode. Raises BadInput if its gripper commands are neither -1 and 1 nor 0 and 1."""
        gripper = episode.actions[:, 6]
        distance = episode.proprio[:, 6] - episode.proprio[:, 7]
        self.commands.update(gripper.tolist())
        if not self.commands <= {-1.0, 1.0} and not self.commands <= {0.0, 1.0}:
            first_commands = ", ".join(f"{command:g}" for command in sorted(self.commands)[:5])
            raise BadInput(
                f"{episode.location}: the gripper's actions are {first_commands}; expected two values, -1 and +1 or 0 "
                "and 1: round and scale them to these"
            )
        for step in range(len(gripper) - FINGER_STEPS):
            command = gripper[step]
            if (gripper[step : step + FINGER_STEPS] == command).all():
                change = float(distance[step + FINGER_STEPS] - distance[step])
                self.distance_changes[float(command)].append(change)

    def closing_command(self, folder: Path) -> float:
        """The command after which the fingers come closer. Raises BadInput if their motion does not show it."""
        low = min(self.commands)
        high = max(self.commands)
        change_after_low = np.mean(self.distance_changes[low] or [0.0])
        change_after_high = np.mean(self.distance_changes[high] or [0.0])
        difference = change_after_high - change_after_low
        if abs(difference) < LEAST_FINGER_MOTION_M:
            raise BadInput(
                f"{folder}: which value closes the gripper ({low:g} or {high:g}) cannot be told, because the fingers "
                "of its states never follow: expected their joints (m) as values 7 and 8 of the state"
            )
        return high if difference < 0 else low


def open_foreign(folder: Path, flip: Flip) -> tuple[int, Iterator[tuple[str, DemoEpisode]]]:
    """Check all numbers of a dataset; returns the number of usable episodes, and a generator of (location, episode).

    All numbers are checked before any image is decoded, so that a wrong dataset is refused early. Raises BadInput.
    """
    survey = GripperSurvey()
    num_steps = 0
    num_moving_steps = 0
    num_episodes = 0
    num_short = 0
    for episode in _read_stored(folder, with_pictures=False):
        check_contents(episode)
        survey.add(episode)
        num_moving = len(moving_steps(episode.actions))
        num_steps += len(episode.actions)
        num_moving_steps += num_moving
        num_episodes += 1
        num_short += num_moving < CHUNK_LENGTH
    if num_short == num_episodes:
        raise BadInput(f"{folder}: none of {num_episodes} episodes moves for {CHUNK_LENGTH} env steps")
    closing = survey.closing_command(folder)
    print(
        f"{folder}: {num_episodes} episodes, gripper {min(survey.commands):g} and {max(survey.commands):g}, "
        f"{closing:g} closes; left out: {num_short} episodes shorter than a chunk, {num_steps - num_moving_steps} of "
        f"{num_steps} env steps in which nothing moves",
        flush=True,
    )
    return num_episodes - num_short, _converted(folder, closing, flip)


def _converted(folder: Path, closing: float, flip: Flip) -> Iterator[tuple[str, DemoEpisode]]:
    """Yield (location, episode) of all episodes that are long enough, without the env steps in which nothing moves."""
    with ThreadPoolExecutor() as pool:  # threads run in parallel: image codecs release Python's lock
        for stored in _read_stored(folder, with_pictures=True):
            kept = moving_steps(stored.actions)
            if len(kept) < CHUNK_LENGTH:
                continue
            actions = stored.actions[kept]
            actions[:, 6] = np.where(actions[:, 6] == closing, 1.0, -1.0)
            # Like openvla-oft, keep only frames that are followed by a whole chunk of actions.
            shown = kept[: len(kept) - CHUNK_LENGTH + 1]
            frames = [stored.pictures[step] for step in shown]
            jpegs = list(pool.map(partial(_as_jpegs, flip=flip, location=stored.location), frames))
            episode = DemoEpisode(
                jpegs=jpegs,
                proprio=stored.proprio[shown],
                frame_steps=np.arange(len(shown)),
                actions=actions,
                instruction=stored.instruction,
                noise_scale=0.0,
                env_steps=len(stored.actions),
                looks="official",
            )
            yield stored.location, episode


def _as_jpegs(pictures: Sequence[bytes | np.ndarray], flip: Flip, location: str) -> list[bytes]:
    """The images of one frame as JPEG files. Raises BadInput for images that cannot be read or are not square.

    The images that a policy observes are compressed to JPEG and decoded once. A JPEG file has had that already, so it
    stays as it is, if `flip` is "none". Every other image is compressed now.
    """
    jpegs = []
    row_stride, column_stride = STRIDES[flip]
    for picture in pictures:
        try:
            image = (
                Image.open(io.BytesIO(picture)) if isinstance(picture, bytes) else Image.fromarray(picture)
            )
            if isinstance(picture, bytes) and image.format == "JPEG" and flip == "none":
                jpegs.append(picture)
            else:
                jpegs.append(encode_jpeg(np.asarray(image.convert("RGB"))[::row_stride, ::column_stride]))
        except Exception as fault:  # a damaged picture can raise nearly any exception in Pillow
            raise BadInput(
                f"{location}: a picture cannot be read ({first_line(fault)}): download the dataset again"
            ) from fault
        if image.width != image.height:
            raise BadInput(
                f"{location}: images of {image.width} x {image.height}; LIBERO's are square: crop them"
            )
    return jpegs
