"""LeRobot datasets and RLDS folders give the frames that our own format gives, or one line that says why not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from contracts import BadInput, read_json, write_json
from tests.foreign_files import (
    CAMERA_KEYS,
    as_our_own,
    example,
    png,
    pq,
    record,
    rlds_features,
    tfrecord,
    write_lerobot,
    write_parquet,
    write_rlds,
)
from tests.small_checkpoint import SMALL
from vla.dataset_statistics import STATISTICS_FILE, load_statistics
from vla.images import encode_jpeg
from workshop.demo_files import episode_path, write_episode
from workshop.foreign_demos import find_demos, open_foreign
from workshop.rlds import read_dataset
from workshop.sft_data import (
    chunk_tokens,
    dataset_statistics,
    find_demo_folders,
    make_observations,
    read_episodes,
)
from workshop.stored_episode import StoredEpisode

RECORDINGS = [record(0), record(1, steps=22), record(2)]
STEPS = len(RECORDINGS[0].actions)
STATES = RECORDINGS[0].proprio


def training_data(folder: Path, flip: str = "none") -> dict[str, object]:
    """What training reads from a folder."""
    episodes = read_episodes([folder], num_images=2, image_size=SMALL.image_size, flip=flip)
    entry = dataset_statistics([episode for episode, _ in episodes])
    write_json(folder / STATISTICS_FILE, {"any": entry})
    observations = make_observations(episodes)
    return {
        "statistics": entry,
        "tokens": chunk_tokens(episodes, load_statistics(folder)["any"]).numpy(),
        "images": np.stack([one.images for one in observations]),
        "proprio": np.stack([one.proprio for one in observations]),
        "instructions": [one.instruction for one in observations],
    }


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("ours")
    for index, recording in enumerate(RECORDINGS):
        write_episode(episode_path(folder, 0, index), as_our_own(recording))
    return training_data(folder)


def with_gripper(recording: StoredEpisode, opens: float, closes: float) -> StoredEpisode:
    """The same motion of the fingers, recorded with other values of the gripper's command."""
    actions = recording.actions.copy()
    actions[:, 6] = np.where(actions[:, 6] > 0, closes, opens)
    return replace(recording, actions=actions)


FLIPPED = [replace(recording, pictures=np.flip(recording.pictures, (2, 3))) for recording in RECORDINGS]


@pytest.mark.parametrize(
    ("write", "flip"),
    [
        (lambda folder: write_lerobot(folder, RECORDINGS), "none"),
        (lambda folder: write_rlds(folder, RECORDINGS), "none"),
        (lambda folder: write_rlds(folder, RECORDINGS, encode_jpeg), "none"),
        (lambda folder: write_rlds(folder, FLIPPED), "both"),
        # The fingers show which value closes the gripper.
        (lambda folder: write_rlds(folder, [with_gripper(one, 0.0, 1.0) for one in RECORDINGS]), "none"),
        (lambda folder: write_rlds(folder, [with_gripper(one, 1.0, 0.0) for one in RECORDINGS]), "none"),
        (lambda folder: write_rlds(folder, [with_gripper(one, 1.0, -1.0) for one in RECORDINGS]), "none"),
    ],
)
def test_the_frames_are_those_of_our_own_format(write, flip, ours, tmp_path):
    np.testing.assert_equal(training_data(write(tmp_path / "libero"), flip), ours)


def test_a_video_gives_the_same_frames_up_to_its_codec(ours, tmp_path):
    theirs = training_data(write_lerobot(tmp_path / "libero", RECORDINGS, video=True))
    differences = np.abs(theirs["images"].astype(float) - ours["images"]).mean((1, 2, 3, 4))
    assert differences.max() < 6  # frames of other steps differ by about 50
    np.testing.assert_equal(theirs | {"images": None}, ours | {"images": None})


@pytest.mark.parametrize("write", [write_lerobot, write_rlds])
def test_failures_short_episodes_still_steps_and_the_gripper_the_other_way_round_are_left_out(
    write, ours, tmp_path
):
    stored = [with_still_steps(recording) for recording in RECORDINGS]
    failed = replace(record(4), success=False)
    folder = write(
        tmp_path / "libero", [failed, *stored, record(3, steps=7), with_gripper(record(5), 1, -1), failed]
    )
    np.testing.assert_equal(training_data(folder), ours)


def with_still_steps(recording: StoredEpisode) -> StoredEpisode:
    """Two still env steps at the start and one before step 5: its observation once more, the gripper as it was."""
    before = [0, 0, 5]
    still_actions = np.zeros((3, 7), np.float32)
    still_actions[:, 6] = recording.actions[[0, 0, 4], 6]
    return replace(
        recording,
        pictures=np.insert(recording.pictures, before, recording.pictures[before], axis=0),
        proprio=np.insert(recording.proprio, before, recording.proprio[before], axis=0),
        actions=np.insert(recording.actions, before, still_actions, axis=0),
    )


def changed(**values: object) -> Callable[[Path], None]:
    """A writer of an RLDS folder of one episode, some of whose features are changed (None: left out)."""

    def write(folder: Path) -> None:
        features = rlds_features(RECORDINGS[0])
        for name, value in values.items():
            features[f"steps/{name.replace('__', '/')}"] = value
        kept = {name: value for name, value in features.items() if value is not None}
        (folder / "libero-train.tfrecord-00000-of-00001").write_bytes(tfrecord(example(kept)))

    return write


def actions_with(column: int, value: object) -> np.ndarray:
    actions = RECORDINGS[0].actions.copy()
    actions[:, column] = value
    return actions.ravel()


def euler_states() -> np.ndarray:
    """Roll near pi, which jumps to -pi, where an axis-angle is continuous."""
    states = STATES.copy()
    states[:, 3:6] = Rotation.from_rotvec(states[:, 3:6]).as_euler("xyz")
    return states.ravel()


def following_hand(factor: float) -> np.ndarray:
    """States in which the hand moves `factor` m in an env step by an action of 1."""
    states = STATES.copy()
    told = RECORDINGS[0].actions[:, :3]
    states[:, :3] = factor * (np.cumsum(told, axis=0) - told)
    return states.ravel()


SMALLER = [png(np.zeros((128, 128, 3), np.uint8))] * STEPS
SWAPPED_FINGERS = STATES[:, [0, 1, 2, 3, 4, 5, 7, 6]].ravel()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (changed(action=None), "steps/action"),
        (changed(observation__state=SWAPPED_FINGERS), "finger joints"),
        (changed(observation__state=euler_states()), "Euler angles"),
        (changed(action=actions_with(2, 1.5)), r"1\.5"),
        (changed(action=actions_with(6, np.linspace(0, 1, STEPS))), r"0\.0588"),
        (changed(action=actions_with(6, 1)), "closes the gripper"),
        (changed(observation__state=following_hand(-0.012)), r"-0\.012 m"),
        (changed(observation__state=following_hand(0.5)), r"0\.5 m"),
        (changed(observation__image=SMALLER), "128 x 128"),
        (changed(observation__wrist_image=None), "--num-images 2"),
        (changed(language_instruction=[b"open it", *[b"close it"] * (STEPS - 1)]), "instruction changes"),
    ],
)
def test_what_cannot_be_mapped_is_refused_in_one_line(write, message, tmp_path):
    write(tmp_path)
    with pytest.raises(BadInput, match=message):
        read_episodes([tmp_path], num_images=2, image_size=SMALL.image_size)


def test_rlds_files_that_are_cut_or_missing_are_refused(tmp_path):
    folder = write_rlds(tmp_path, RECORDINGS)
    first, *_, last = sorted(folder.iterdir())
    last.write_bytes(last.read_bytes()[:-40])
    with pytest.raises(BadInput, match=last.name):
        open_foreign(folder, "none")
    first.unlink()
    with pytest.raises(BadInput, match="2 of 3 files"):
        open_foreign(folder, "none")


DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def change_rows(path: Path, change: Callable[[list[dict]], object]) -> None:
    """Let `change` change the rows of a Parquet file."""
    rows = pq.read_table(path).to_pylist()
    change(rows)
    write_parquet(path, rows)


def more_episodes_than_files(folder: Path) -> None:
    path = folder / "meta" / "info.json"
    write_json(path, read_json(path) | {"total_episodes": 5})


def cut_data(folder: Path) -> None:
    (folder / DATA).write_bytes((folder / DATA).read_bytes()[:-200])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "meta" / "tasks.jsonl").touch(), r"tasks\.jsonl"),
        (more_episodes_than_files, "3 of 5 episodes"),
        (lambda folder: (folder / DATA).write_bytes(b"version https://git-lfs.github.com"), "git lfs pull"),
        (cut_data, "download the dataset again"),
    ],
)
def test_lerobot_datasets_that_are_damaged_or_unclear_are_refused(damage, message, tmp_path):
    folder = write_lerobot(tmp_path / "libero", RECORDINGS)
    damage(folder)
    with pytest.raises(BadInput, match=message):
        training_data(folder)


@pytest.mark.parametrize("drift_s", [0.06, -0.06])
def test_a_video_that_drifts_from_its_table_by_half_a_frame_is_refused(drift_s, tmp_path):
    """A frame takes 0.1 s. The second episode begins at 1.8 s."""
    folder = write_lerobot(tmp_path / "libero", RECORDINGS, video=True)
    drifted = {f"videos/{CAMERA_KEYS[0]}/from_timestamp": 1.8 + drift_s}
    change_rows(folder / EPISODES, lambda rows: rows[1].update(drifted))
    with pytest.raises(BadInput, match="episode 1"):
        training_data(folder)


def test_pictures_that_are_not_embedded_are_read_beside_the_table(ours, tmp_path):
    folder = write_lerobot(tmp_path / "libero", RECORDINGS)

    def move_pictures(rows: list[dict]) -> None:
        for index, row in enumerate(rows):
            for key in CAMERA_KEYS:
                path = f"images/{key}/{index}.png"
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(row[key]["bytes"])
                row[key] = {"bytes": None, "path": path}

    change_rows(folder / DATA, move_pictures)
    np.testing.assert_equal(training_data(folder), ours)


def test_a_dataset_is_named_by_its_folder(tmp_path):
    goal_folder = write_rlds(tmp_path / "libero_goal_no_noops", RECORDINGS[:1])
    my_folder = write_rlds(tmp_path / "mine", RECORDINGS[:1])
    assert find_demos(goal_folder) == (goal_folder, "libero_goal_no_noops")
    assert find_demos(goal_folder.parent) == (goal_folder, "libero_goal_no_noops")
    (goal_folder / ".libero-train.tfrecord-00000-of-00001.Xy12Zz").touch()  # of a download that was cut off
    with pytest.raises(BadInput, match="Xy12Zz is no file of a dataset"):
        next(read_dataset(goal_folder, with_pictures=False))
    (tmp_path / ".cache" / "goal").mkdir(parents=True)
    (tmp_path / ".cache" / "goal" / "train.tfrecord.metadata").touch()  # of a download from the hub
    with pytest.raises(BadInput, match=r": libero_goal_no_noops/1\.0\.0, mine"):
        find_demos(tmp_path)
    both = [str(goal_folder), str(my_folder)]
    assert find_demo_folders(both, "libero_goal") == ([goal_folder, my_folder], "libero_goal_no_noops")
    with pytest.raises(BadInput, match="--task-suite"):
        find_demo_folders(both, None)
