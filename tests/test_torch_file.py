"""Plain tensors and values come back; kinds of tensors that no state dict of ours holds are refused."""

import collections

import pytest
import torch

from errors import BadInput
from untrusted.torch_file import load_torch


def test_tensors_and_values_come_back(tmp_path):
    shared = torch.arange(12.0).view(3, 4)
    stored = {
        "a": shared, "rows": shared[1:], "turned": shared.T, "half": torch.ones(2).bfloat16(), "count": torch.tensor(7),
        "empty": torch.zeros(0, 3), "parameter": torch.nn.Parameter(torch.ones(2)),
        "values": (1, 2.5, None, "x", [True, 1 << 70]), "ordered": collections.OrderedDict(b=1),
    }  # fmt: skip
    torch.save(stored, tmp_path / "x.pt")
    loaded = load_torch(tmp_path / "x.pt")
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], value) for name, value in stored.items() if isinstance(value, torch.Tensor))
    assert (loaded["values"], loaded["ordered"]) == (stored["values"], stored["ordered"])


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1).expand(10**12),
        torch.zeros(16).to_sparse(),
        torch.zeros(10**6, 10**6, device="meta"),
        bytearray(3),
        {1, 2},
        torch.float32,
    ],
)
def test_claims_without_values_and_other_objects_are_refused(tmp_path, value):
    torch.save({"nested": [value]}, tmp_path / "x.pt")
    with pytest.raises(BadInput, match=r"x\.pt"):
        load_torch(tmp_path / "x.pt")
