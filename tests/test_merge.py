import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from contracts import BadInput
from tests.small_checkpoint import make_small_checkpoint
from vla import merge as merge_module
from vla.checkpoint import inspect_checkpoint
from vla.lora import Adapter
from vla.merge import main, merge, merged_weight
from vla.policy import Policy
from vla.preprocessing import read_observations
from vla.probes import synthetic_observations
from vla.weights import write_weights

SUITE = "libero_spatial"


def _trained(base: Path, **options) -> Policy:
    policy = Policy.load(str(base), task_suite=SUITE, lora_rank=4, lora_alpha=8, **options)
    generator = torch.Generator().manual_seed(1)
    for _, parameter in policy.named_trainable_parameters():
        with torch.no_grad():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """With an L1 head and several shards."""
    folder = make_small_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint", l1_head=True)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_weights(folder, tensors, torch.float32, max_bytes=3_000_000)
    return folder


@pytest.fixture(scope="module")
def policy(base) -> Policy:
    return _trained(base)


@pytest.fixture(scope="module")
def adapter(policy, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "best"
    policy.save_adapter(folder, samples=synthetic_observations(policy, count=2, seed=3))
    (folder / "metadata.json").write_text(json.dumps({"global_step": 512, "score": 0.75}))
    return folder


@pytest.fixture(scope="module")
def merged(adapter, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("out") / "merged"
    assert merge(adapter, out) == 1.0
    return out


def test_merged_folder_is_the_adapter_on_top_of_its_base(policy, merged):
    observations = synthetic_observations(policy, count=4)
    plain = Policy.load(str(merged), task_suite=SUITE)
    expected = policy.chunk_logits(observations).detach()
    torch.testing.assert_close(plain.chunk_logits(observations).detach(), expected, rtol=0, atol=1e-4)
    with policy.teacher():
        assert (policy.chunk_logits(observations) - expected).abs().max() > 0.1


def test_merged_folder_is_a_plain_checkpoint_in_the_bases_shards_and_dtype(base, merged):
    before, after = inspect_checkpoint(base), inspect_checkpoint(merged)
    assert before.weights.keys() == after.weights.keys()
    for key, tensor in before.weights.items():
        other = after.weights[key]
        assert (tensor.path.name, tensor.dtype, tensor.shape) == (other.path.name, other.dtype, other.shape)
    names = {path.name for path in merged.iterdir()}
    kept = {path.name for path in base.iterdir()} - {"action_head--latest_checkpoint.pt"}
    assert names == kept | {"merge_metadata.json", "README.md"}
    # The head is gone, since training changed what it reads; the number of images, once found out by it, is not.
    assert (after.num_images, after.uses_proprio, after.has_l1_head) == (2, True, False)


def test_trained_proprio_projector_is_written_under_the_reference_names(policy, merged):
    state = torch.load(merged / "proprio_projector--latest_checkpoint.pt", weights_only=True)
    trained = policy.network.proprio_projector.state_dict()
    assert state.keys() == {f"module.{key}" for key in trained}
    assert all(torch.equal(state[f"module.{key}"], trained[key]) for key in trained)


def test_card_and_metadata_say_where_the_weights_come_from(base, merged):
    metadata = json.loads((merged / "merge_metadata.json").read_text())
    assert (metadata["base_model"], metadata["rank"], metadata["alpha"]) == (str(base), 4, 8)
    card = (merged / "README.md").read_text()
    assert "| score | 0.75 |" in card
    assert str(base) in card


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 2, 2)])
def test_merged_weight_is_the_closed_form_in_float32(shape, tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    down = torch.randn(2, *shape[1:])
    up = torch.randn(6, 2, *([1, 1] if len(shape) == 4 else []))
    adapter = Adapter(tmp_path, 2, 8, None, None, False, {"m.lora_A": down, "m.lora_B": up})
    change = torch.einsum("or,r...->o...", up.flatten(1).double(), down.double())
    expected = (weight.double() + 4.0 * change).bfloat16()
    assert torch.equal(merged_weight(weight, adapter, "m"), expected)


def test_bfloat16_base_is_merged_within_bfloat16(tmp_path, monkeypatch):
    base = make_small_checkpoint(tmp_path / "base", dtype=torch.bfloat16)
    policy = _trained(base)
    observations = synthetic_observations(policy, count=2)
    policy.save_adapter(tmp_path / "adapter", observations)
    # Random weights have many near-ties, which bfloat16 decides either way; the weights are what is tested here.
    monkeypatch.setattr(merge_module, "SMALLEST_AGREEMENT", 0.5)
    merge(tmp_path / "adapter", tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    plain = Policy.load(str(tmp_path / "out"), task_suite=SUITE)
    difference = plain.chunk_logits(observations) - policy.chunk_logits(observations)
    assert difference.abs().max() < 0.3
    assert difference.abs().mean() < 0.03


def test_projector_among_the_bases_weights_becomes_a_file(base, tmp_path):
    """As SimpleVLA-RL writes it."""
    other = shutil.copytree(base, tmp_path / "rl")
    path = other / "proprio_projector--latest_checkpoint.pt"
    state = torch.load(path, weights_only=True)
    path.unlink()
    shard = sorted(other.glob("*.safetensors"))[0]
    moved = {key.replace("module.", "proprio_projector."): tensor for key, tensor in state.items()}
    merge_module.write_tensors(shard, load_file(shard) | moved)
    policy = _trained(other)
    policy.save_adapter(tmp_path / "adapter", synthetic_observations(policy, count=1))
    merge(tmp_path / "adapter", tmp_path / "out")
    info = inspect_checkpoint(tmp_path / "out")
    assert not info.proprio_weights
    assert info.proprio_file is not None


# Refusals: no folder appears, and the message says what to do


def test_merged_folder_is_not_merged_again(merged, tmp_path):
    with pytest.raises(BadInput, match="is a merged checkpoint already"):
        merge(merged, tmp_path / "out")


def test_merging_twice_into_the_result_is_refused(adapter, merged, tmp_path):
    with pytest.raises(BadInput, match="trained on other weights"):
        merge(adapter, tmp_path / "out", base=str(merged))
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(adapter, tmp_path):
    other = make_small_checkpoint(tmp_path / "other", seed=5)
    with pytest.raises(BadInput, match="trained on other weights"):
        merge(adapter, tmp_path / "out", base=str(other))
    assert not (tmp_path / "out").exists()


def test_existing_folder_is_not_overwritten(adapter, tmp_path):
    with pytest.raises(BadInput, match="exists already"):
        merge(adapter, tmp_path)


def test_folder_without_adapter_is_refused(base, tmp_path):
    with pytest.raises(BadInput, match=r"holds no adapter_config\.json"):
        merge(base, tmp_path / "out")


def test_disagreeing_merge_is_not_published(adapter, tmp_path, monkeypatch):
    wrong = merge_module.merged_weight
    monkeypatch.setattr(merge_module, "merged_weight", lambda weight, *rest: -wrong(weight, *rest))
    with pytest.raises(BadInput, match=r"agree on .* expected 99%"):
        merge(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_agreement_is_measured_on_the_stored_observations(adapter, merged, monkeypatch):
    stored = read_observations(adapter / "sample_observations.npz")
    seen = []
    act = Policy.act
    monkeypatch.setattr(Policy, "act", lambda self, observations: seen.extend(observations) or act(self, observations))
    info = inspect_checkpoint(merged)
    merge_module.action_token_agreement(info, str(merged), None, merged, "cpu", stored)
    assert len(seen) == 2 * len(stored)
    assert (seen[0].images == stored[0].images).all()


def test_command_line_merges(adapter, tmp_path, capsys):
    flags = ["--adapter", str(adapter), "--out", str(tmp_path / "out"), "--device", "cpu"]
    main(flags)
    assert "100.0% of the action tokens" in capsys.readouterr().out
    assert inspect_checkpoint(tmp_path / "out").weights


def test_command_line_reports_bad_input_in_one_line(base, tmp_path):
    with pytest.raises(BadInput) as refused:
        main(["--adapter", str(base), "--out", str(tmp_path / "out")])
    assert "\n" not in str(refused.value)
