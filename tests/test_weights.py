import errno
import math
import pickle
import resource

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from contracts import BadInput
from vla.weights import (
    fingerprint,
    read_header,
    read_metadata,
    read_pt,
    read_tensors,
    stream_tensors,
    weight_files,
    write_tensors,
)

CPU = torch.device("cpu")


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(40, 50, generator=generator).bfloat16(),
        "b": torch.randn(7, generator=generator),
        "empty": torch.zeros(0, 3),
    }


def test_header_describes_what_the_library_wrote(tmp_path, tensors):
    save_file(tensors, tmp_path / "x.safetensors", metadata={"who": "me"})
    header, metadata = read_header(tmp_path / "x.safetensors")
    assert {name: entry.shape for name, entry in header.items()} == {k: tuple(t.shape) for k, t in tensors.items()}
    assert (header["a"].dtype, header["b"].dtype) == ("BF16", "F32")
    assert header["a"].end - header["a"].start == 40 * 50 * 2
    assert metadata == {"who": "me"}


def test_written_tensors_are_read_back_bit_identical(tmp_path, tensors):
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors, {"note": "n"})
    stored = read_tensors(path)
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in stored)
    assert all(stored[name].dtype == tensors[name].dtype for name in stored)
    assert read_metadata(path) == {"format": "pt", "note": "n"}
    assert path.stat().st_mode & 0o444 == 0o444


def test_streamed_tensors_outlive_the_file(tmp_path, tensors):
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors)
    streamed = dict(stream_tensors(read_header(path)[0].values(), CPU, torch.float32))
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(streamed["a"], tensors["a"].float())
    assert torch.equal(streamed["b"], tensors["b"])


def _write_npz(path):
    with path.open("wb") as file:
        np.savez(file, a=np.zeros(3))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "is missing"),
        (lambda path: path.write_bytes(b""), "not a safetensors file"),
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "not a safetensors file"),
        (_write_npz, "not a safetensors file"),
        (lambda path: path.write_bytes((20).to_bytes(8, "little") + b"{" + b" " * 40), "unreadable header"),
        (lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"), "unreadable header"),
    ],
)
def test_broken_safetensors_file_is_named(tmp_path, write, message):
    path = tmp_path / "model.safetensors"
    write(path)
    with pytest.raises(BadInput, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_truncated_file_is_named_with_expected_and_found_size(tmp_path, tensors):
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInput, match=f"expected {size} bytes, found {size - 100}"):
        read_header(path)


def test_offsets_that_point_outside_the_data_are_refused(tmp_path):
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-8, 4]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(BadInput, match="unreadable header"):
        read_header(path)


def test_fingerprint_ignores_how_tensors_are_spread_over_files(tmp_path, tensors):
    write_tensors(tmp_path / "whole.safetensors", tensors)
    write_tensors(tmp_path / "1.safetensors", {"b": tensors["b"]})
    write_tensors(tmp_path / "2.safetensors", {"empty": tensors["empty"], "a": tensors["a"]})
    whole = read_header(tmp_path / "whole.safetensors")[0]
    parts = read_header(tmp_path / "1.safetensors")[0] | read_header(tmp_path / "2.safetensors")[0]
    assert fingerprint(whole.values()) == fingerprint(parts.values())


@pytest.mark.parametrize("change", [lambda t: t * 1.01, lambda t: t.float(), lambda t: t.view(50, 40)])
def test_fingerprint_tells_values_dtypes_and_shapes_apart(tmp_path, tensors, change):
    write_tensors(tmp_path / "x.safetensors", tensors)
    before = fingerprint(read_header(tmp_path / "x.safetensors")[0].values())
    write_tensors(tmp_path / "x.safetensors", tensors | {"a": change(tensors["a"])})
    assert fingerprint(read_header(tmp_path / "x.safetensors")[0].values()) != before


def test_index_decides_which_files_are_read(tmp_path):
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}')
    assert weight_files(tmp_path) == [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_index_cannot_lead_out_of_the_folder(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(BadInput, match="weight_map"):
        weight_files(tmp_path)


def test_pt_loses_the_prefix_of_distributed_training(tmp_path):
    torch.save({"module.fc1.weight": torch.ones(2)}, tmp_path / "x.pt")
    assert list(read_pt(tmp_path / "x.pt")) == ["fc1.weight"]


class _Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


def test_code_in_a_pickle_is_refused_and_not_run(tmp_path):
    marker = tmp_path / "ran"
    torch.save({"module.fc1.weight": _Payload(marker)}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(_Payload(marker), protocol=2))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises(BadInput, match=f"{name}.* (was not loaded|no readable archive)"):
            read_pt(tmp_path / name)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"\x80\x02}q\x00."])
def test_pt_without_tensors_is_refused(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    if content.startswith(b"\x80"):
        torch.save([1, 2], tmp_path / "x.pt")
    with pytest.raises(BadInput, match=r"x\.pt"):
        read_pt(tmp_path / "x.pt")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_number_that_is_none_is_refused_with_its_tensors_name(tmp_path, tensors, name, value):
    tensors[name][3] = value
    write_tensors(tmp_path / "x.safetensors", tensors)
    torch.save({"module.empty": torch.zeros(0), f"module.{name}": tensors[name]}, tmp_path / "x.pt")
    for path, read in ((tmp_path / "x.safetensors", read_tensors), (tmp_path / "x.pt", read_pt)):
        with pytest.raises(BadInput, match=f"{path.name}: tensor {name} holds NaN or infinity"):
            read(path)


def test_values_whose_sum_is_beyond_float32_are_no_fault(tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"large": torch.full((4,), 3e38), "whole": torch.arange(3)})
    assert read_tensors(tmp_path / "x.safetensors")["large"][0] == 3e38


def test_a_full_disk_is_an_oserror_with_its_number(tmp_path, tensors):
    """The kernel refuses to let the file grow (RLIMIT_FSIZE)."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError) as refused:
            write_tensors(tmp_path / "x.safetensors", tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(tmp_path / "x.safetensors"))


def _safetensors(header: str, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + data


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "F32", "shape": [1000000000000000], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
        ' "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e400]}}',
        '{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}',
        "[" * 100_000,
    ],
    ids=["a shape beyond the data", "two tensors in one place", "infinity", "negative", "unknown dtype", "deep"],
)
def test_headers_that_claim_more_than_there_is_are_refused(tmp_path, header):
    (tmp_path / "x.safetensors").write_bytes(_safetensors(header, bytes(8)))
    with pytest.raises(BadInput, match=r"x\.safetensors"):
        read_header(tmp_path / "x.safetensors")
