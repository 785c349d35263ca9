"""Writing is proven by reading back in test_checkpoint.py; here are the rules of the format alone."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.small_checkpoint import make_small_checkpoint
from vla.checkpoint import save_checkpoint
from vla.policy import Policy
from vla.weights import write_weights


def test_shards_are_cut_before_they_grow_too_large():
    assert plan_shards({"a": 3, "b": 2, "c": 4, "d": 9, "e": 1}, max_bytes=5) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert plan_shards({"a": 9}, max_bytes=5) == [["a"]]


def test_one_small_set_of_weights_is_one_file_without_index(tmp_path):
    write_weights(tmp_path, {"a": torch.ones(3)}, torch.bfloat16)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["a"].dtype == torch.bfloat16


def test_index_names_the_shard_of_every_tensor_and_the_size_in_bytes(tmp_path):
    state = {name: torch.full((10,), float(i)) for i, name in enumerate("abcde")}
    write_weights(tmp_path, state, torch.bfloat16, max_bytes=40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 10 * 2
    assert index["weight_map"].keys() == state.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name].float(), state[name])
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_state_dicts_have_the_prefix_of_distributed_training(tmp_path):
    write_state_dict(tmp_path / "x.pt", {"fc1.weight": torch.ones(2, requires_grad=True)})
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(state) == ["module.fc1.weight"]
    assert not state["module.fc1.weight"].requires_grad


def test_network_with_adapters_is_not_written_in_a_format_that_cannot_hold_them(tmp_path):
    policy = Policy.load(str(make_small_checkpoint(tmp_path / "small")), task_suite="libero_spatial")
    with pytest.raises(ValueError, match="merge them first"):
        save_checkpoint(tmp_path / "out", policy.network, {})
    assert not (tmp_path / "out").exists()
