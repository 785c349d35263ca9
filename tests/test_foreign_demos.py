"""LeRobot datasets and RLDS folders give the frames that our own format gives, or one line that says why not."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import workshop
from contracts import BadInput
from tests.foreign_files import (
    Recording,
    as_our_own,
    example,
    png,
    record,
    rlds_features,
    tfrecord,
    write_lerobot,
    write_rlds,
)
from tests.small_checkpoint import SMALL, make_small_checkpoint
from vla.checkpoint import inspect_checkpoint
from vla.dataset_statistics import load_statistics
from workshop import foreign_demos
from workshop.demo_files import encode_jpeg, episode_path, write_episode
from workshop.foreign_demos import find_demos, open_foreign
from workshop.sft import fine_tune
from workshop.sft_config import SftArgs
from workshop.sft_data import (
    chunk_tokens,
    dataset_statistics,
    find_demo_folders,
    make_observations,
    read_episodes,
)

Frames = dict[str, np.ndarray]
RECORDINGS = [record(0), record(1, steps=22), record(2)]
WRITERS = {
    "LeRobot": write_lerobot,
    "RLDS of PNG": write_rlds,
    "RLDS of JPEG": lambda folder, recordings: write_rlds(folder, recordings, encode_jpeg),
}


def frames_of(folder: Path, flip: str = "none") -> tuple[Frames, dict]:
    """What training reads, and the statistics."""
    episodes = read_episodes([folder], num_images=2, image_size=SMALL.image_size, flip=flip)
    checkpoint = make_small_checkpoint(folder / "statistics")
    entry = dataset_statistics([episode for episode, _ in episodes])
    frames = {"tokens": chunk_tokens(episodes, next(iter(load_statistics(checkpoint).values()))).numpy()}
    for name in ("images", "proprio", "instruction"):
        frames[name] = np.stack([getattr(observation, name) for observation in make_observations(episodes)])
    return frames, entry


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> tuple[Frames, dict]:
    folder = tmp_path_factory.mktemp("ours")
    for index, recording in enumerate(RECORDINGS):
        write_episode(episode_path(folder, 0, index), as_our_own(recording))
    return frames_of(folder)


def assert_equal(theirs: tuple[Frames, dict], ours: tuple[Frames, dict]) -> None:
    assert theirs[1] == ours[1]
    for name, values in ours[0].items():
        np.testing.assert_array_equal(theirs[0][name], values, name)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_frames_are_those_of_our_own_format(kind, ours, tmp_path):
    assert_equal(frames_of(WRITERS[kind](tmp_path / "libero", RECORDINGS)), ours)


def test_a_video_gives_the_same_frames_up_to_its_codec(ours, tmp_path):
    theirs, entry = frames_of(write_lerobot(tmp_path / "libero", RECORDINGS, video=True))
    assert_equal((theirs | {"images": ours[0]["images"]}, entry), ours)
    differences = np.abs(theirs["images"].astype(float) - ours[0]["images"]).mean((1, 2, 3, 4))
    assert differences.max() < 6  # frames of other steps differ by about 50


@pytest.mark.parametrize("convention", [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0)], ids=str)
def test_the_grippers_convention_is_found_in_what_the_fingers_do(convention, ours, tmp_path):
    """Values that open and close it."""
    stored = [replace(each, actions=each.actions.copy()) for each in RECORDINGS]
    for each in stored:
        each.actions[:, 6] = np.where(each.actions[:, 6] > 0, convention[1], convention[0])
    assert_equal(frames_of(write_rlds(tmp_path, stored)), ours)


@pytest.mark.parametrize(("flip", "axes"), [("both", (2, 3)), ("horizontal", (3,)), ("vertical", (2,))])
def test_pictures_are_turned_upright(flip, axes, ours, tmp_path):
    stored = [replace(each, images=np.flip(each.images, axes)) for each in RECORDINGS]
    assert_equal(frames_of(write_rlds(tmp_path, stored), flip), ours)


def test_env_steps_in_which_nothing_moves_are_left_out(ours, tmp_path, capsys):
    stored = []
    for each in RECORDINGS:
        at = [0, 0, 5]  # before these steps, the next one's observation once more
        still = each.actions[[0, 0, 4]] * np.array([0] * 6 + [1], np.float32)
        stored.append(
            Recording(
                np.insert(each.images, at, each.images[at], axis=0),
                np.insert(each.proprio, at, each.proprio[at], axis=0),
                np.insert(each.actions, at, still, axis=0),
                each.instruction,
            )
        )
    assert_equal(frames_of(write_rlds(tmp_path, [*stored, record(3, steps=7)])), ours)
    assert (
        "1 episodes shorter than a chunk, 9 of 74 env steps in which nothing moves" in capsys.readouterr().out
    )


def changed(**values: object) -> Callable[[Path], Path]:
    """Writes an RLDS folder of one episode with some features changed (None: left out)."""

    def write(folder: Path) -> Path:
        features = rlds_features(RECORDINGS[0]) | {
            f"steps/{n.replace('__', '/')}": v for n, v in values.items()
        }
        path = folder / "libero-train.tfrecord-00000-of-00001"
        path.write_bytes(
            tfrecord(example({name: value for name, value in features.items() if value is not None}))
        )
        return folder

    return write


def actions_with(column: int, value: object) -> np.ndarray:
    actions = RECORDINGS[0].actions.copy()
    actions[:, column] = value
    return actions.ravel()


STEPS = len(RECORDINGS[0].actions)
WIDE = [png(np.zeros((48, 64, 3), np.uint8))] * STEPS
STATES = RECORDINGS[0].proprio


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (changed(action=None), "no steps/action among its features: .*steps/reward"),
        (changed(observation__state=STATES[:, :7].ravel()), r"states of shape \(7,\), expected 8 values"),
        (changed(observation__state=STATES[:, [0, 1, 2, 3, 4, 5, 7, 6]].ravel()), "are no finger joints"),
        (changed(action=actions_with(2, 1.5)), r"a motion of 1\.5, beyond \[-1, 1\]"),
        (changed(action=actions_with(0, np.nan)), "actions that are not finite"),
        (changed(action=actions_with(6, np.linspace(0, 1, STEPS))), "the gripper's actions are 0, 0.0588"),
        (changed(action=actions_with(6, 1)), "which value closes the gripper"),
        (changed(language_instruction=[b""] * STEPS), "no instruction"),
        (changed(observation__front=WIDE, observation__side=WIDE, observation__image=None), "cameras .*front"),
        (changed(observation__image=WIDE), "pictures of 64 x 48"),
        (changed(observation__image=[b"\x89PNG"] * STEPS), "a picture cannot be read"),
        (changed(observation__wrist_image=None), "1 images per frame, --num-images 2 needs more"),
    ],
)  # fmt: skip
def test_what_cannot_be_mapped_is_refused_in_one_line(write, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        read_episodes([write(tmp_path)], num_images=2, image_size=SMALL.image_size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-40], "ends 40 bytes too early"),
        (lambda data: data + b"more", "no readable TFRecord file"),
        (lambda data: b"", "no readable TFRecord file"),
    ],
    ids=["short", "long", "empty"],
)
def test_damaged_records_are_refused(damage, message, tmp_path):
    path = next(write_rlds(tmp_path, RECORDINGS[:1]).iterdir())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInput, match=message):
        open_foreign(path.parent, "none")


def test_a_folder_that_lacks_a_file_is_refused(tmp_path):
    folder = write_rlds(tmp_path, RECORDINGS)
    next(folder.iterdir()).unlink()
    with pytest.raises(BadInput, match=r"2 of 3 files libero-train\.tfrecord"):
        open_foreign(folder, "none")


@pytest.mark.parametrize("damage", ["version", "rows", "column", "file", "video"])
def test_damaged_lerobot_datasets_are_refused(damage, tmp_path):
    folder = write_lerobot(
        tmp_path / "libero", RECORDINGS, damage == "video", "v2.1" if damage == "version" else "v3.0"
    )
    data = folder / "data" / "chunk-000" / "file-000.parquet"
    if damage in ("rows", "column"):
        pq = pytest.importorskip("pyarrow.parquet")
        table = pq.read_table(data)
        pq.write_table(table.slice(0, len(table) - 1) if damage == "rows" else table.drop(["action"]), data)
    elif damage == "file":
        data.write_bytes(b"text")
    elif damage == "video":
        next(folder.rglob("*.mp4")).write_bytes(b"text")
    messages = {
        "version": "codebase_version v2.1, expected v3.0",
        "rows": "has 17 of 18 rows",
        "column": "no action",
    }
    with pytest.raises(BadInput, match=messages.get(damage, "no readable LeRobot dataset")):
        list(open_foreign(folder, "none")[1])


def test_without_the_packages_that_read_lerobot_one_line_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.delitem(sys.modules, "workshop.lerobot", raising=False)
    monkeypatch.delattr(workshop, "lerobot", raising=False)
    with pytest.raises(BadInput, match=r"the package av; run: pip install -r requirements-demos\.txt"):
        open_foreign(tmp_path, "none")


def test_a_dataset_is_named_by_its_folder(tmp_path):
    folders = [write_rlds(tmp_path / name, RECORDINGS[:1]) for name in ("libero_goal_no_noops", "mine")]
    assert find_demos(folders[0].parent) == find_demos(folders[0]) == (folders[0], "libero_goal_no_noops")
    with pytest.raises(BadInput, match=r"holds several RLDS datasets.*libero_goal_no_noops/1\.0\.0, mine"):
        find_demos(tmp_path)
    given = [str(folder) for folder in folders]
    assert find_demo_folders(given, "libero_goal") == (folders, "libero_goal_no_noops")
    with pytest.raises(BadInput, match="--task-suite"):
        find_demo_folders(given, None)
    (tmp_path / "ours").mkdir()
    assert find_demo_folders([str(tmp_path / "ours")], None)[1] == "libero_spatial_no_noops"


def test_a_dataset_of_the_hub_is_downloaded_or_taken_from_the_cache(tmp_path, monkeypatch):
    write_rlds(tmp_path / "0123abcd" / "libero_10_no_noops", RECORDINGS[:1])
    asked = []

    def snapshot_download(repo, **options):
        asked.append((repo, *options.values()))
        return str(tmp_path / "0123abcd")

    def no_network(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr(foreign_demos, "snapshot_download", snapshot_download)
    monkeypatch.setattr(foreign_demos.HfApi, "dataset_info", no_network)
    folder, name = find_demos("openvla/modified_libero_rlds/libero_10_no_noops")
    assert (folder.relative_to(tmp_path).parts[1:], name) == (
        ("libero_10_no_noops", "1.0.0"),
        "libero_10_no_noops",
    )
    assert asked == [("openvla/modified_libero_rlds", "dataset", ["libero_10_no_noops/*"], True)]
    monkeypatch.setattr(foreign_demos, "snapshot_download", no_network)
    with pytest.raises(
        BadInput, match="owner/libero: no such folder, and no dataset of the hub or its cache"
    ):
        find_demos("owner/libero")


def test_a_policy_is_trained_on_it_and_its_statistics_bear_its_name(tmp_path):
    folder = write_rlds(tmp_path / "libero_goal_no_noops", RECORDINGS)
    options = {"size": SMALL, "holdout": 0.0, "device": "cpu", "steps": 2, "batch_size": 4, "warmup_steps": 1}
    info = inspect_checkpoint(fine_tune(SftArgs((str(folder),), tmp_path / "out", **options)))
    assert (list(info.statistics), info.looks) == (["libero_goal_no_noops"], ("official",))
