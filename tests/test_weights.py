import math
from pathlib import Path

import pytest
import torch

from contracts import BadInput
from vla.weights import (
    fingerprint,
    read_header,
    read_pt,
    read_tensors,
    write_tensors,
)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(40, 50, generator=generator).bfloat16(),
        "b": torch.randn(7, generator=generator),
        "empty": torch.zeros(0, 3),
    }


def test_written_tensors_are_read_back_bit_identical(tmp_path, tensors):
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors, {"note": "n"})
    stored = read_tensors(path)
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in stored)
    assert all(stored[name].dtype == tensors[name].dtype for name in stored)
    header, metadata = read_header(path)
    assert metadata == {"format": "pt", "note": "n"}
    assert {name: entry.shape for name, entry in header.items()} == {
        k: tuple(t.shape) for k, t in tensors.items()
    }
    assert (header["a"].dtype, header["b"].dtype) == ("BF16", "F32")
    assert path.stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("content", [None, b"", b"version https://git-lfs.github.com/spec/v1\n", b"cut"])
def test_missing_broken_and_truncated_safetensors_files_are_named(tmp_path, tensors, content):
    path = tmp_path / "model.safetensors"
    if content == b"cut":
        write_tensors(path, tensors)
        content = path.read_bytes()[:-100]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        BadInput, match="is missing" if content is None else "not a whole safetensors file"
    ) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_fingerprint_ignores_how_tensors_are_spread_over_files(tmp_path, tensors):
    write_tensors(tmp_path / "whole.safetensors", tensors)
    write_tensors(tmp_path / "1.safetensors", {"b": tensors["b"]})
    write_tensors(tmp_path / "2.safetensors", {"empty": tensors["empty"], "a": tensors["a"]})
    whole = read_header(tmp_path / "whole.safetensors")[0]
    parts = read_header(tmp_path / "1.safetensors")[0] | read_header(tmp_path / "2.safetensors")[0]
    assert fingerprint(whole.values()) == fingerprint(parts.values())


def test_fingerprint_is_that_which_adapters_of_earlier_runs_hold():
    header, _ = read_header(Path(__file__).parent / "golden" / "checkpoint" / "model.safetensors")
    assert fingerprint(header.values()) == "96146dd40ce6436fbe29d1e91732467a27ba47e5492d815d339798f87fd234f6"


@pytest.mark.parametrize("change", [lambda t: t * 1.01, lambda t: t.float(), lambda t: t.view(50, 40)])
def test_fingerprint_tells_values_dtypes_and_shapes_apart(tmp_path, tensors, change):
    write_tensors(tmp_path / "x.safetensors", tensors)
    before = fingerprint(read_header(tmp_path / "x.safetensors")[0].values())
    write_tensors(tmp_path / "x.safetensors", tensors | {"a": change(tensors["a"])})
    assert fingerprint(read_header(tmp_path / "x.safetensors")[0].values()) != before


class _Payload:
    """Pickled code: opening it would create the file `ran`."""

    def __reduce__(self):
        return (open, ("ran", "w"))


@pytest.mark.parametrize("content", [{"module.fc1.weight": _Payload()}, [1, 2], None])
def test_pt_with_code_or_without_tensors_is_refused_and_not_run(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "x.pt") if content else Path("x.pt").touch()
    with pytest.raises(BadInput, match=r"x\.pt is no file of tensors"):
        read_pt(tmp_path / "x.pt")
    assert not Path("ran").exists()


@pytest.mark.parametrize(("name", "value"), [("a", math.nan), ("b", -math.inf)])
def test_a_number_that_is_none_is_refused_with_its_tensors_name(tmp_path, tensors, name, value):
    tensors[name][3] = value
    write_tensors(tmp_path / "x.safetensors", tensors)
    torch.save({"module.empty": torch.zeros(0), f"module.{name}": tensors[name]}, tmp_path / "x.pt")
    for path, read in ((tmp_path / "x.safetensors", read_tensors), (tmp_path / "x.pt", read_pt)):
        with pytest.raises(BadInput, match=f"{path.name}: tensor {name} holds NaN or infinity"):
            read(path)
