import numpy as np
import pytest

from contracts import BadInput
from vla.preprocessing import jpeg_round_trip
from workshop.demo_files import (
    DemoEpisode,
    decode_jpeg,
    encode_jpeg,
    episode_path,
    read_episode,
    write_episode,
)

ARRAYS = ("proprio", "frame_steps", "actions", "objects")


@pytest.fixture(scope="module")
def episode() -> DemoEpisode:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (3, 2, 32, 32, 3), np.uint8)
    return DemoEpisode(
        task_id=7,
        init_state_id=39,
        instruction="pick up the black bowl on the stove",
        noise_scale=0.3,
        jpegs=[[encode_jpeg(image) for image in frame] for frame in images],
        proprio=generator.normal(size=(3, 8)).astype(np.float32),
        frame_steps=np.array([1, 5, 13]),
        actions=generator.uniform(-1, 1, (21, 7)).astype(np.float32),
        objects=generator.normal(size=(3, 6)).astype(np.float32),
        env_steps=16,
        looks="official",
    )


def test_an_episode_comes_back_as_it_was_written(tmp_path, episode):
    path = episode_path(tmp_path / "new folder", 7, 12)
    write_episode(path, episode)
    again = read_episode(path)
    assert path.name == "episode_07_000012.npz"
    for name in ("task_id", "init_state_id", "instruction", "noise_scale", "jpegs", "env_steps", "looks"):
        assert getattr(again, name) == getattr(episode, name)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(again, name), getattr(episode, name))
        assert getattr(again, name).dtype == getattr(episode, name).dtype


def broken(path, **changes) -> None:
    """Rewrite the file with some of its arrays changed (None: left out)."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def test_a_file_of_before_looks_were_recorded_is_read(tmp_path, episode):
    path = episode_path(tmp_path, 0, 0)
    write_episode(path, episode)
    broken(path, looks=None)
    assert read_episode(path).looks == ""


@pytest.mark.parametrize(
    "changes",
    [{"proprio": None}, {"proprio": np.zeros((2, 8), np.float32)}, {"actions": np.zeros((20, 7), np.float32)}],
    ids=["missing", "short", "no chunk for a frame"],
)
def test_contents_that_do_not_fit_are_bad_input(tmp_path, episode, changes):
    path = episode_path(tmp_path, 0, 0)
    write_episode(path, episode)
    broken(path, **changes)
    with pytest.raises(BadInput, match=r"episode_00_000000\.npz"):
        read_episode(path)


@pytest.mark.parametrize("content", [b"", b"no archive", None], ids=["empty", "text", "cut short"])
def test_damaged_files_are_bad_input(tmp_path, episode, content):
    path = episode_path(tmp_path, 0, 0)
    write_episode(path, episode)
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(BadInput, match=r"episode_00_000000\.npz"):
        read_episode(path)


def test_a_frame_that_is_read_has_had_the_round_trip_of_the_training_data():
    image = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    np.testing.assert_array_equal(decode_jpeg(encode_jpeg(image)), jpeg_round_trip(image))
