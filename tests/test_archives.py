"""Arrays come back as numpy wrote them; what claims more than it holds is refused."""

import io
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from errors import BadInput
from tests.fuzzing.archives import HOSTILE_PICKLES, bomb, zip_of
from untrusted.archives import check_stored, named_in_pickle, read_npz, read_pickle


@given(
    array=st.sampled_from([np.uint8, np.int64, np.float32, np.float64, bool, "<U7"]).flatmap(
        lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    ),
    pack=st.sampled_from([np.savez, np.savez_compressed]),
    turned=st.booleans(),
)
def test_arrays_come_back_as_numpy_reads_them(tmp_path_factory, array, pack, turned):
    path = tmp_path_factory.getbasetemp() / "arrays.npz"
    pack(path, a=array.T if turned else array)
    mine, theirs = read_npz(path, ("a",))["a"], np.load(path)["a"]
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("descr", "shape"),
    [("'<f4'", "(1000000000000,)"), ("'<f4'", "(2,)"), ("'|O'", "(3,)"), ("__import__('os')", "(3,)")],
)
def test_headers_that_do_not_describe_their_bytes_are_refused(tmp_path, descr, shape):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(12)
    (tmp_path / "a.npz").write_bytes(zip_of([("a.npy", member)]))
    with pytest.raises(BadInput, match=r"a\.npz: is no readable \.npz file"):
        read_npz(tmp_path / "a.npz", ("a",))


def test_a_member_that_unpacks_to_a_gb_is_refused_before_it_is_unpacked(tmp_path):
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    path = tmp_path / "a.npz"
    path.write_bytes(zip_of([("a.npy", file.getvalue())], {0: bomb(file.getvalue())}))
    assert path.stat().st_size < 3e6
    assert zipfile.ZipFile(path).getinfo("a.npy").file_size > 1e9
    for read in (
        lambda: read_npz(path, ("a",)),
        lambda: read_pickle(path, "a.npy", 1 << 28),
        lambda: check_stored(path),
    ):
        with pytest.raises(BadInput, match=r"a\.npz"):
            read()


def test_names_in_pickles_are_found_without_importing_them():
    assert named_in_pickle(pickle.dumps({"a": [1, 2.5]}, protocol=2)) == set()
    named = set().union(*(named_in_pickle(program) for program in HOSTILE_PICKLES))
    assert {"posix.mkdir", "__builtin__.eval", "posix.system"} <= named


def test_a_pickle_that_makes_the_memo_huge_is_refused():
    with pytest.raises(ValueError, match="memo number"):
        named_in_pickle(b"\x80\2Kar\xff\xff\xff\x7f.")
