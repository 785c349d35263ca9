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


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b"text"], ids=["cut", "no archive"]
)
def test_damaged_files_are_bad_input(written, damage):
    path, _ = written
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInput, match=r"episode_07_000012\.npz"):
        read_episode(path)
