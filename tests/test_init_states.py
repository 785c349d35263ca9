import io
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from envs.init_states import load_init_states
from envs.tasks import libero_root
from errors import BadInput

STORED = libero_root() / "init_files"


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"])
def test_states_are_those_that_torch_reads(suite):
    path = sorted((STORED / suite).glob("*.pruned_init"))[0]
    np.testing.assert_array_equal(load_init_states(path), torch.load(path, weights_only=False))


def write_archive(path, payload: bytes):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/version", "3\n")
    return path


class Malicious:
    def __init__(self, call, *arguments):
        self.reduction = (call, arguments)

    def __reduce__(self):
        return self.reduction


def test_code_inside_a_file_does_not_run(tmp_path):
    trace = tmp_path / "trace"
    path = write_archive(tmp_path / "evil.pruned_init", pickle.dumps(Malicious(os.mkdir, str(trace)), protocol=2))
    with pytest.raises(BadInput, match="mkdir"):
        load_init_states(path)
    assert not trace.exists()


def test_a_codec_other_than_latin1_is_refused(tmp_path):
    import _codecs

    path = write_archive(tmp_path / "codec.pruned_init", pickle.dumps(Malicious(_codecs.encode, "x", "zip"), 2))
    with pytest.raises(BadInput, match="codec 'zip'"):
        load_init_states(path)


@pytest.mark.parametrize(
    "content",
    [
        [1.0, 2.0],
        np.zeros(3),
        np.zeros((0, 92)),
        np.array([[np.nan, 1.0]]),
        np.zeros((2, 3), np.float32),
        np.array([[{}]], dtype=object),
    ],
    ids=["list", "one-dimensional", "empty", "not finite", "float32", "objects"],
)
def test_anything_but_a_finite_float64_table_is_refused(tmp_path, content):
    path = write_archive(tmp_path / "odd.pruned_init", pickle.dumps(content, protocol=2))
    with pytest.raises(BadInput, match="unreadable"):
        load_init_states(path)


def test_a_table_written_by_todays_numpy_and_torch_is_read(tmp_path):
    table = np.arange(12.0).reshape(3, 4)
    torch.save(table, tmp_path / "own.pruned_init")
    np.testing.assert_array_equal(load_init_states(tmp_path / "own.pruned_init"), table)


def test_damaged_files_are_named(tmp_path):
    whole = sorted((STORED / "libero_goal").glob("*.pruned_init"))[0].read_bytes()
    truncated = tmp_path / "truncated.pruned_init"
    truncated.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=r"truncated\.pruned_init"):
        load_init_states(truncated)
    payload = zipfile.ZipFile(io.BytesIO(whole)).read("archive/data.pkl")
    cut = write_archive(tmp_path / "cut.pruned_init", payload[:500])
    with pytest.raises(BadInput, match=r"cut\.pruned_init"):
        load_init_states(cut)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"none\.pruned_init does not exist"):
        load_init_states(tmp_path / "none.pruned_init")
