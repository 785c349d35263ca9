import numpy as np
import pytest

from contracts import Observation
from contracts import BadInput
from vla.preprocessing import read_observations, write_observations


def test_observations_survive_the_file(tmp_path):
    random = np.random.default_rng(0)
    observations = [
        Observation(random.integers(0, 256, (2, 8, 8, 3), dtype=np.uint8), random.normal(size=8), text)
        for text in ("pick up the bowl", "öffne die Schublade")
    ]
    write_observations(tmp_path / "o.npz", observations)
    for stored, original in zip(read_observations(tmp_path / "o.npz"), observations, strict=True):
        assert np.array_equal(stored.images, original.images)
        assert stored.images.dtype == np.uint8
        assert np.array_equal(stored.proprio, original.proprio)
        assert stored.instruction == original.instruction


def _object_array(path):
    np.savez(path, images=np.array([{}]), proprio=np.zeros(1), instructions=np.array(["a"]))


@pytest.mark.parametrize("write", [lambda path: path.write_bytes(b"nothing"), _object_array])
def test_broken_file_is_named_and_never_unpickled(tmp_path, write):
    path = tmp_path / "o.npz"
    write(path)
    with pytest.raises(BadInput, match=r"o\.npz: is no readable .npz file"):
        read_observations(path)
