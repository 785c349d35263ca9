"""Convert demonstrations of other programs to `DemoEpisode`s: LeRobot v3 datasets (lerobot.py), RLDS folders (rlds.py).

Datasets do not say which value of the gripper's command closes it, whether states have finger joints in metres, and
whether actions are those of LIBERO's env. The numbers have to show it, or the dataset is refused: the fingers' motion
after a command shows which value closes, for example. Numbers cannot tell which way up images are. They are taken as
upright, which means LIBERO's own renderings turned by 180 degrees. They are so in openvla's RLDS data and in what was
made from them (`lerobot/libero`, `HuggingFaceVLA/libero`). For other datasets `flip` turns the images.
"""

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from contracts import BadInput, first_line, read_fields
from envs.env import IMAGE_SIZE
from experiment.terminal import say
from vla.images import encode_jpeg
from workshop import rlds
from workshop.demo_files import CHUNK_LENGTH, KEY_SUFFIX, RECIPE_FILE, DemoEpisode
from workshop.sft_config import Flip
from workshop.stored_episode import StoredEpisode, check_contents, moving_steps, positive_closes

# Name of a flip -> strides of the image's rows and columns.
STRIDES = {"none": (1, 1), "both": (-1, -1), "horizontal": (1, -1), "vertical": (-1, 1)}
EIGHT_BIT_COLOURS = ("RGB", "RGBA", "P")  # Pillow's modes; others have no colours, or lose them if converted
VERSION = r"\d+\.\d+\.\d+"


def find_demos(folder: str | Path) -> tuple[Path, str]:
    """The folder that holds a dataset's files, which may lie below `folder`, and the name of its statistics.

    Raises BadInput if there is no such folder, or if it holds several datasets.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise BadInput(
            f"--demos {folder}: no such folder; `hf download --repo-type dataset` gets those of the hub"
        )
    records = (file.relative_to(root) for file in root.rglob("*.tfrecord*"))
    # Where the hub's program downloads to, it leaves files of the same names in .cache.
    record_folders = sorted({root / file.parent for file in records if not file.parts[0].startswith(".")})
    if len(record_folders) > 1:
        names = ", ".join(str(folder.relative_to(root)) for folder in record_folders)
        raise BadInput(f"--demos {root} holds several RLDS datasets: name one of its folders: {names}")
    data_folder = record_folders[0] if record_folders else root
    if is_foreign(data_folder):
        # The dataset's name is the last folder in the path that is not a version, such as 1.0.0.
        parts = [*root.resolve().parts, *data_folder.relative_to(root).parts]
        return data_folder, [part for part in parts if not re.fullmatch(VERSION, part)][-1]
    recipe = data_folder / RECIPE_FILE
    suite = read_fields(recipe, str, part="task_suite") if recipe.exists() else "libero_spatial"
    return data_folder, suite + KEY_SUFFIX


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a LeRobot dataset or holds TFRecord files."""
    return _is_lerobot(folder) or any(folder.glob("*.tfrecord*"))


def _is_lerobot(folder: Path) -> bool:
    return (folder / "meta" / "info.json").exists()


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


def open_foreign(folder: Path, flip: Flip) -> tuple[int, Iterator[tuple[str, DemoEpisode]]]:
    """Check all numbers of a dataset; returns the number of usable episodes, and a generator of (location, episode).

    All numbers are checked before any image is decoded, so that a wrong dataset is refused early. Raises BadInput.
    """
    left_out: Counter[str] = Counter()  # why -> how many episodes
    # Index of an episode -> whether the gripper's positive command closes it
    signs: dict[int, bool | None] = {}
    num_steps = 0
    num_still_steps = 0
    for index, episode in enumerate(_read_stored(folder, with_pictures=False)):
        check_contents(episode)
        num_moving = len(moving_steps(episode.actions))
        num_steps += len(episode.actions)
        num_still_steps += len(episode.actions) - num_moving
        if episode.success is False:
            left_out["failed"] += 1
        elif num_moving < CHUNK_LENGTH:
            left_out["shorter than a chunk"] += 1
        else:
            signs[index] = positive_closes(episode)
    counts = Counter(sign for sign in signs.values() if sign is not None)
    closes = counts.most_common(1)[0][0] if counts else None
    used = [index for index, sign in signs.items() if sign in (None, closes)]
    left_out["with the gripper's sign turned round"] = len(signs) - len(used)
    parts = [f"{count} episodes {reason}" for reason, count in left_out.items() if count]
    reasons = ", ".join(parts) or "no episode"
    if not used:
        raise BadInput(f"{folder}: nothing to learn from: {reasons}")
    if closes is None:
        raise BadInput(
            f"{folder}: which value closes the gripper cannot be told, because the fingers of its states never follow: "
            "expected their joints (m) as values 7 and 8 of the state"
        )
    say(
        f"{folder}: {len(used)} episodes, the gripper's value {'1' if closes else '0 or -1'} closes; left out: "
        f"{reasons}, {num_still_steps} of {num_steps} env steps in which nothing moves"
    )
    return len(used), _converted(folder, used, closes, flip)


def _converted(
    folder: Path, used: Sequence[int], positive_closes: bool, flip: Flip
) -> Iterator[tuple[str, DemoEpisode]]:
    """Yield (location, episode) of the `used` episodes, without the env steps in which nothing moves."""
    with ThreadPoolExecutor() as pool:  # threads run in parallel: image codecs release Python's lock
        for index, stored in enumerate(_read_stored(folder, with_pictures=True)):
            if index not in used:
                continue
            kept = moving_steps(stored.actions)
            actions = stored.actions[kept]
            actions[:, 6] = np.where((actions[:, 6] > 0) == positive_closes, 1.0, -1.0)
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
    """The images of one frame as JPEG files. Raises BadInput for images that cannot be read or have another size.

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
        if image.mode not in EIGHT_BIT_COLOURS:
            raise BadInput(f"{location}: pictures of Pillow's mode {image.mode}, expected 8 bits of RGB")
        if image.size != (IMAGE_SIZE, IMAGE_SIZE):
            raise BadInput(
                f"{location}: pictures of {image.width} x {image.height}, a policy sees {IMAGE_SIZE} x {IMAGE_SIZE}: "
                "render the demonstrations again in that size"
            )
    return jpegs
