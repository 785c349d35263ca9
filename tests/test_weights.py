"""Files of tensors: what is written is read back; what is damaged, or no tensor, is refused by name."""

import math
from pathlib import Path

import pytest
import torch

from contracts import BadInput
from vla.weights import fingerprint, read_header, read_pt, read_tensors, write_tensors


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
    assert {name: entry.shape for name, entry in header.items()} == {
        "a": (40, 50),
        "b": (7,),
        "empty": (0, 3),
    }
    assert (header["a"].dtype, header["b"].dtype) == ("BF16", "F32")
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


def test_fingerprint_ignores_how_tensors_are_spread_over_files(tmp_path, path, tensors):
    parts = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    write_tensors(path, tensors)
    write_tensors(parts[0], {"b": tensors["b"]})
    write_tensors(parts[1], {"empty": tensors["empty"], "a": tensors["a"]})
    assert fingerprint_of(path) == fingerprint_of(*parts)


def test_fingerprint_is_that_which_adapters_of_earlier_runs_hold():
    golden = Path(__file__).parent / "golden" / "checkpoint" / "model.safetensors"
    assert fingerprint_of(golden) == "96146dd40ce6436fbe29d1e91732467a27ba47e5492d815d339798f87fd234f6"


@pytest.mark.parametrize("change", [lambda t: t * 1.01, lambda t: t.float(), lambda t: t.view(50, 40)])
def test_fingerprint_tells_values_dtypes_and_shapes_apart(path, tensors, change):
    write_tensors(path, tensors)
    before = fingerprint_of(path)
    write_tensors(path, tensors | {"a": change(tensors["a"])})
    assert fingerprint_of(path) != before


class Payload:
    """Pickled code: opening it would create the file `ran`."""

    def __reduce__(self):
        return (open, ("ran", "w"))


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.complex64)])
def test_numbers_that_are_no_weights_are_refused(tmp_path, path, tensor):
    write_tensors(path, {"a": tensor})
    torch.save({"a": tensor}, tmp_path / "x.pt")
    with pytest.raises(BadInput, match=f"{path}: a "):
        read_tensors(path)
    with pytest.raises(BadInput, match=r"x\.pt: a "):
        read_pt(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_pointers_of_git_lfs_are_called_so(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(BadInput, match="git lfs pull"):
        (read_pt if name == "x.pt" else read_header)(tmp_path / name)


@pytest.mark.parametrize(
    "content", [{"module.fc1.weight": Payload()}, {"fc1.weight": 3}, {3: torch.zeros(2)}, [1, 2], None]
)
def test_pt_with_code_or_without_tensors_is_refused_and_not_run(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    if content is None:
        Path("x.pt").touch()
    else:
        torch.save(content, "x.pt")
    with pytest.raises(BadInput, match=r"x\.pt"):
        read_pt(tmp_path / "x.pt")
    assert not Path("ran").exists()


@pytest.mark.parametrize(("name", "value"), [("a", math.nan), ("b", -math.inf)])
def test_nan_and_infinity_are_refused_with_the_name_of_their_tensor(tmp_path, path, tensors, name, value):
    tensors[name][3] = value
    write_tensors(path, tensors)
    pt_path = tmp_path / "x.pt"
    torch.save({"module.empty": torch.zeros(0), f"module.{name}": tensors[name]}, pt_path)
    with pytest.raises(BadInput, match=rf"{path}.*tensor {name} "):
        read_tensors(path)
    with pytest.raises(BadInput, match=rf"{pt_path}.*tensor {name} "):
        read_pt(pt_path)


def test_numbers_whose_sum_overflows_are_read(path):
    large = torch.full((4,), 3e38)
    write_tensors(path, {"large": large})
    assert torch.equal(read_tensors(path)["large"], large)
