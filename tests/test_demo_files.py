import numpy as np
import pytest

from contracts import BadInput
from tests.demo_episodes import make_episode
from workshop.demo_files import episode_path, list_episodes, read_episode, write_episode


def test_an_episode_comes_back_as_it_was_written_and_a_cut_file_is_refused(tmp_path):
    path = episode_path(tmp_path / "new folder", 7, 12)
    episode = make_episode(0)
    write_episode(path, episode)
    np.testing.assert_equal(vars(read_episode(path)), vars(episode))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadInput, match=r"episode_07_000012\.npz"):
        read_episode(path)


def test_hdf5_files_are_called_by_their_name(tmp_path):
    (tmp_path / "pick_up_the_black_bowl_demo.hdf5").touch()
    with pytest.raises(BadInput, match="HDF5"):
        list_episodes(tmp_path)
