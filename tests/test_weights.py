"""Files of tensors: what is written is read back; what is damaged, or no tensor, is refused by name."""

from pathlib import Path

import pytest
import torch

from contracts import BadInput
from vla.weights import fingerprint, read_header, read_tensors, write_tensors


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(40, 50, generator=generator).bfloat16(),
        "b": torch.randn(7, generator=generator),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def test_written_tensors_are_read_back_bit_identical(path, tensors):
    write_tensors(path, tensors, {"note": "n"})
    stored = read_tensors(path)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name], tensor)
        assert stored[name].dtype == tensor.dtype
    header, metadata = read_header(path)
    assert metadata == {"format": "pt", "note": "n"}
    assert (header["a"].dtype, header["a"].shape) == ("BF16", (40, 50))
    assert path.stat().st_mode & 0o444 == 0o444  # readable for everyone


@pytest.mark.parametrize("content", ["missing", b"", b"version https://git-lfs.github.com/spec/v1\n", "cut"])
def test_missing_broken_and_truncated_safetensors_files_are_named(path, tensors, content):
    if content == "cut":
        write_tensors(path, tensors)
        path.write_bytes(path.read_bytes()[:-100])
    elif content != "missing":
        path.write_bytes(content)
    with pytest.raises(BadInput, match=str(path)):
        read_header(path)


def fingerprint_of(*paths: Path) -> str:
    return fingerprint([tensor for path in paths for tensor in read_header(path)[0].values()])


def test_fingerprint_is_that_which_adapters_hold_and_ignores_how_tensors_are_spread_over_files(tmp_path):
    golden = Path(__file__).parent / "golden" / "checkpoint" / "model.safetensors"
    assert fingerprint_of(golden) == "96146dd40ce6436fbe29d1e91732467a27ba47e5492d815d339798f87fd234f6"
    names = list(read_header(golden)[0])
    parts = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    for path, part in zip(parts, (names[::2], names[1::2]), strict=True):
        tensors = read_tensors(golden)
        write_tensors(path, {name: tensors[name] for name in part})
    assert fingerprint_of(*parts) == fingerprint_of(golden)


@pytest.mark.parametrize("change", [lambda t: t * 1.01, lambda t: t.float(), lambda t: t.view(50, 40)])
def test_fingerprint_tells_values_dtypes_and_shapes_apart(path, tensors, change):
    write_tensors(path, tensors)
    before = fingerprint_of(path)
    write_tensors(path, tensors | {"a": change(tensors["a"])})
    assert fingerprint_of(path) != before
