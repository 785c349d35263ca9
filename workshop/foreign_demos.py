"""Demonstrations of other programs as our own `DemoEpisode`s: LeRobot v3 datasets (lerobot.py), RLDS folders (rlds.py).

What a dataset does not say is read from its numbers, or refused: which value of the gripper closes it (by what the
fingers did next), whether states are finger joints in metres, whether actions are those of LIBERO's env. Which way up
pictures are cannot be read from them. They are taken as upright, as openvla's RLDS data and what was made from them
are (`lerobot/libero`, `HuggingFaceVLA/libero`): LIBERO's own renderings turned by 180 degrees. `flip` is for others.
"""

import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from huggingface_hub import HfApi, snapshot_download
from PIL import Image

from contracts import BadInput, first_line
from vla.checkpoint import HUB_TIMEOUT_S
from workshop.demo_files import CHUNK_LENGTH, LIBERO_SIZES, DemoEpisode, encode_jpeg

Flip = Literal["none", "both", "horizontal", "vertical"]
STRIDES = {
    "none": (1, 1),
    "both": (-1, -1),
    "horizontal": (1, -1),
    "vertical": (-1, 1),
}  # of rows and columns
AGENTVIEW = ("image", "agentview", "agentview_image", "agentview_rgb")
NOOP_NORM = 1e-4  # of the six motions: below it an env step does not move the arm
FINGER_STEPS = 5  # env steps of one command to the gripper, after which it shows in the fingers
FINGER_LIMIT_M = 0.06  # a finger of LIBERO's robot goes from 0 to 0.04 m, and a little beyond either
LEAST_FINGER_MOTION_M = 1e-4  # by which the two commands' mean motions differ


@dataclass(frozen=True)
class StoredEpisode:
    """T env steps as another program stored them: what was seen before each, and the action that followed."""

    where: str  # for messages
    pictures: Sequence[
        Sequence[bytes | np.ndarray]
    ]  # [T][cameras], agentview, wrist: files or (H, W, 3); or unread
    proprio: np.ndarray  # (T, 8) float32 as in DemoEpisode
    actions: np.ndarray  # (T, 7) float32, two values of the gripper
    instruction: str


def find_demos(given: str | Path) -> tuple[Path, str]:
    """The folder that holds the files of a dataset, and its name ("" for demonstrations of workshop.demos).

    given: a folder, or a dataset of the hub, owner/name or owner/name/folder, which is downloaded. Raises BadInput.
    """
    root = Path(given).expanduser()
    if not root.is_dir() and (hub := re.fullmatch(r"([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)", str(given))):
        root = _download(hub[1], hub[2].strip("/"))
    records = sorted({path.parent for path in root.rglob("*.tfrecord*")})
    if len(records) > 1:
        names = ", ".join(str(folder.relative_to(root)) for folder in records)
        raise BadInput(f"--demos {given} holds several RLDS datasets: name one of its folders: {names}")
    folder = records[0] if records else root
    parts = [*Path(given).expanduser().resolve().parts, *folder.relative_to(root).parts]
    names_of_it = [
        part for part in parts if not re.fullmatch(r"\d+\.\d+\.\d+", part)
    ]  # else the dataset's version
    return folder, names_of_it[-1] if is_foreign(folder) else ""


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a LeRobot dataset or holds TFRecord files."""
    return _is_lerobot(folder) or any(folder.glob("*.tfrecord*"))


def _is_lerobot(folder: Path) -> bool:
    return (folder / "meta" / "info.json").exists()


def _download(repo: str, subfolder: str) -> Path:
    patterns = [f"{subfolder}/*"] if subfolder else None
    try:
        # Asked with a timeout first: snapshot_download waits forever where a network swallows packets.
        HfApi().dataset_info(repo, timeout=HUB_TIMEOUT_S)
        is_offline = False
    except Exception:  # the hub library lets errors of several HTTP libraries through
        is_offline = True
    try:
        found = snapshot_download(
            repo, repo_type="dataset", allow_patterns=patterns, local_files_only=is_offline
        )
        return Path(found, subfolder)
    except Exception as error:
        raise BadInput(
            f"--demos {repo}: no such folder, and no dataset of the hub or its cache ({type(error).__name__}): check "
            f"name and network, or collect demonstrations: python -m workshop.demos --out {repo}"
        ) from error


def _read_stored(folder: Path, with_pictures: bool) -> Iterator[StoredEpisode]:
    if not _is_lerobot(folder):
        from workshop import rlds  # which imports this module

        return rlds.read_dataset(folder, with_pictures)
    try:
        from workshop import lerobot
    except ModuleNotFoundError as missing:
        install = "pip install -r requirements-demos.txt"
        raise BadInput(
            f"{folder}: a LeRobot dataset is read by the package {missing.name}; run: {install}"
        ) from None
    return lerobot.read_dataset(folder, with_pictures)


def open_foreign(folder: Path, flip: Flip) -> tuple[int, Iterator[tuple[str, DemoEpisode]]]:
    """Check all numbers of a dataset, then (how many episodes it has, a generator of where each is and itself)."""
    commands: set[float] = set()  # to the gripper, as stored
    motions: defaultdict[float, list[float]] = defaultdict(
        list
    )  # command -> how the fingers' distance changed (m)
    num_steps, num_kept, num_episodes, num_short = 0, 0, 0, 0
    for episode in _read_stored(folder, with_pictures=False):
        check_numbers(episode)
        gripper, distance = episode.actions[:, 6], episode.proprio[:, 6] - episode.proprio[:, 7]
        commands |= {*gripper.tolist()}
        if not commands <= {-1.0, 1.0} and not commands <= {0.0, 1.0}:
            found = ", ".join(f"{command:g}" for command in sorted(commands)[:5])
            raise BadInput(
                f"{episode.where}: the gripper's actions are {found}; expected two values, -1 and +1 or 0 and 1: "
                "round and scale them to these"
            )
        for step in range(len(gripper) - FINGER_STEPS):
            if (gripper[step : step + FINGER_STEPS] == gripper[step]).all():
                motions[float(gripper[step])].append(float(distance[step + FINGER_STEPS] - distance[step]))
        kept = len(kept_steps(episode.actions))
        num_steps, num_kept, num_episodes = num_steps + len(gripper), num_kept + kept, num_episodes + 1
        num_short += kept < CHUNK_LENGTH
    if num_short == num_episodes:
        raise BadInput(
            f"{folder}: none of its {num_episodes} episodes has {CHUNK_LENGTH} env steps of motion"
        )
    low, high = min(commands), max(commands)
    difference = np.mean(motions[high] or [0.0]) - np.mean(motions[low] or [0.0])
    if abs(difference) < LEAST_FINGER_MOTION_M:
        raise BadInput(
            f"{folder}: which value closes the gripper ({low:g} or {high:g}) cannot be told, as the fingers of its "
            "states never follow: expected their joints (m) as values 7 and 8 of the state"
        )
    closing = high if difference < 0 else low
    print(
        f"{folder}: {num_episodes} episodes, gripper {low:g} and {high:g}, {closing:g} closes; left out: {num_short} "
        f"episodes shorter than a chunk, {num_steps - num_kept} of {num_steps} env steps in which nothing moves",
        flush=True,
    )
    return num_episodes - num_short, _episodes(folder, closing, flip)


def check_numbers(episode: StoredEpisode) -> None:
    """Raises BadInput for states and actions that are not those of LIBERO's robot and env, as far as they tell."""
    steps, (action_dim, proprio_dim) = len(episode.actions), LIBERO_SIZES
    for name, values, width, meaning in (
        ("states", episode.proprio, proprio_dim, "hand position 3, axis-angle 3, finger joints 2"),
        ("actions", episode.actions, action_dim, "motions 6, gripper 1"),
    ):
        if values.shape != (steps, width):
            found = f"{name} of shape {values.shape[1:]}"
            raise BadInput(
                f"{episode.where}: {found}, expected {width} values ({meaning}): convert the dataset"
            )
        if not np.isfinite(values).all():
            raise BadInput(f"{episode.where}: {name} that are not finite: repair or remove this episode")
    if (largest := np.abs(episode.actions[:, :6]).max()) > 1:
        raise BadInput(
            f"{episode.where}: a motion of {largest:.4g}, beyond [-1, 1]: expected relative actions as LIBERO's env "
            "takes them, not absolute ones, and not metres: convert the dataset"
        )
    fingers = episode.proprio[:, 6:]
    if np.abs(fingers).max() > FINGER_LIMIT_M or fingers[:, 0].mean() < fingers[:, 1].mean():
        found = f"[{fingers.min():.3g}, {fingers.max():.3g}]"
        raise BadInput(
            f"{episode.where}: values 7 and 8 of the state in {found} are no finger joints, expected 0 to 0.04 m and "
            "-0.04 to 0 m: not normalised, and in this order"
        )
    if not episode.instruction.strip():
        raise BadInput(f"{episode.where}: no instruction: give the task its text")


def kept_steps(actions: np.ndarray) -> np.ndarray:
    """Indices of the env steps that are no no-ops, int64 (K,). actions: (T, 7).

    A no-op leaves the arm where it is and the gripper as the last kept action had it; where none was kept yet, motion
    alone counts. Source: openvla, experiments/robot/libero/regenerate_libero_dataset.py.
    """
    moves, kept = np.linalg.norm(actions[:, :6], axis=1) >= NOOP_NORM, list[int]()
    for step, action in enumerate(actions):
        if moves[step] or (kept and action[6] != actions[kept[-1], 6]):
            kept.append(step)
    return np.array(kept, np.int64)


def _episodes(folder: Path, closing: float, flip: Flip) -> Iterator[tuple[str, DemoEpisode]]:
    with ThreadPoolExecutor() as pool:  # codecs let go of Python's lock
        for stored in _read_stored(folder, with_pictures=True):
            kept = kept_steps(stored.actions)
            if len(kept) < CHUNK_LENGTH:
                continue
            actions = stored.actions[kept]
            actions[:, 6] = np.where(actions[:, 6] == closing, 1.0, -1.0)
            shown = kept[
                : len(kept) - CHUNK_LENGTH + 1
            ]  # as openvla-oft: frames with a whole chunk after them
            frames = [stored.pictures[step] for step in shown]
            jpegs = list(pool.map(partial(_as_jpegs, flip=flip, where=stored.where), frames))
            episode = DemoEpisode(
                jpegs, stored.proprio[shown], np.arange(len(shown)), actions, task_id=-1, init_state_id=-1,  # not known
                instruction=stored.instruction, noise_scale=0.0, env_steps=len(stored.actions), looks="official",
            )  # fmt: skip
            yield stored.where, episode


def _as_jpegs(pictures: Sequence[bytes | np.ndarray], flip: Flip, where: str) -> list[bytes]:
    """A JPEG file stays as it is, for it has had the round trip that a policy's observations get; others get theirs."""
    rows, columns = STRIDES[flip]
    files = []
    for picture in pictures:
        try:
            image = (
                Image.open(io.BytesIO(picture)) if isinstance(picture, bytes) else Image.fromarray(picture)
            )
            if isinstance(picture, np.ndarray) or image.format != "JPEG" or flip != "none":
                picture = encode_jpeg(np.asarray(image.convert("RGB"))[::rows, ::columns])
        except (OSError, ValueError) as fault:
            raise BadInput(
                f"{where}: a picture cannot be read ({first_line(fault)}): get the dataset anew"
            ) from fault
        if image.width != image.height:
            raise BadInput(
                f"{where}: pictures of {image.width} x {image.height}; LIBERO's are square: crop them"
            )
        files.append(picture)
    return files


def choose_cameras(names: Sequence[str], where: str) -> list[str]:
    """The pictures of agentview, then those of the wrist if there are any, by name. Raises BadInput."""
    last = {name: re.split(r"[./]", name)[-1] for name in names}
    wrist = [name for name in names if re.search(r"wrist|hand|^image_?2$", last[name])]
    others = [name for name in names if name not in wrist]
    agentview = [name for name in others if last[name] in AGENTVIEW] or others
    if len(agentview) != 1 or len(wrist) > 1:
        found = f"cameras {', '.join(names) or 'none'}"
        raise BadInput(
            f"{where}: {found}: which is agentview, which the wrist's? name them image and wrist_image"
        )
    return agentview + wrist
