import numpy as np
import pytest

from contracts import BadInput
from tests.demo_episodes import make_episode
from workshop.demo_files import episode_path, read_episode, write_episode

ARRAYS = ("proprio", "frame_steps", "actions")


@pytest.fixture
def written(tmp_path):
    """(path, the episode in it)."""
    path, episode = episode_path(tmp_path / "new folder", 7, 12), make_episode(0)
    write_episode(path, episode)
    return path, episode


def test_an_episode_comes_back_as_it_was_written(written):
    path, episode = written
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


@pytest.mark.parametrize(
    "damage",
    [{"proprio": None}, {"proprio": np.zeros((2, 8), np.float32)}, {"actions": np.zeros((20, 7), np.float32)}, b"text"],
    ids=["missing", "short", "no chunk for a frame", "no archive"],
)
def test_damaged_files_are_bad_input(written, damage):
    path, _ = written
    path.write_bytes(damage) if isinstance(damage, bytes) else broken(path, **damage)
    with pytest.raises(BadInput, match=r"episode_07_000012\.npz"):
        read_episode(path)
