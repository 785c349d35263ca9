import numpy as np
import pytest

from contracts import BadInput
from tests.demo_episodes import make_episode
from workshop.demo_files import episode_path, list_episodes, read_episode, write_episode


def test_an_episode_comes_back_as_it_was_written(tmp_path):
    path = episode_path(tmp_path / "new folder", 7, 12)
    episode = make_episode(0)
    write_episode(path, episode)
    assert path.name == "episode_07_000012.npz"
    restored = read_episode(path)
    for name, value in vars(episode).items():
        restored_value = getattr(restored, name)
        np.testing.assert_array_equal(restored_value, value)
        assert getattr(restored_value, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize("damage", ["cut", "not an archive"])
def test_damaged_files_are_bad_input(damage, tmp_path):
    path = episode_path(tmp_path, 7, 12)
    write_episode(path, make_episode(0))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"text")
    with pytest.raises(BadInput, match=r"episode_07_000012\.npz"):
        read_episode(path)


def test_hdf5_files_are_called_by_their_name(tmp_path):
    (tmp_path / "libero_spatial").mkdir()
    (tmp_path / "libero_spatial" / "pick_up_the_black_bowl_demo.hdf5").touch()
    with pytest.raises(BadInput, match="HDF5"):
        list_episodes(tmp_path)
