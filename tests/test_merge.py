import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file

from contracts import BadInput, Observation
from tests.small_checkpoint import make_small_checkpoint
from vla import merge as merge_module
from vla.checkpoint import inspect_checkpoint
from vla.loading import LoadOptions
from vla.merge import judge, merge, merged_weight
from vla.policy import Policy
from vla.preprocessing import synthetic_observations
from vla.weights import write_tensors

SUITE = "libero_spatial"


def _trained(base: Path, size: float = 0.05, **options) -> Policy:
    policy = Policy.load(str(base), LoadOptions(task_suite=SUITE, lora_rank=4, lora_alpha=8, **options))
    generator = torch.Generator().manual_seed(1)
    for _, parameter in policy.named_trainable_parameters():
        with torch.no_grad():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return policy


def _made_up(policy: Policy, count: int) -> list[Observation]:
    return synthetic_observations(policy.num_images, policy.statistics.proprio, count)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """With an L1 head and several shards."""
    folder = make_small_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint", l1_head=True)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(tensors, folder, max_shard_size=3_000_000)
    return folder


@pytest.fixture(scope="module")
def policy(base) -> Policy:
    return _trained(base)


@pytest.fixture(scope="module")
def adapter(policy, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "best"
    policy.save_adapter(folder, looks="official")
    (folder / "metadata.json").write_text(json.dumps({"global_step": 512, "score": 0.75}))
    return folder


@pytest.fixture(scope="module")
def merged(adapter, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("out") / "merged"
    assert "agree on 100.0%" in merge(adapter, out)
    return out


def test_merged_folder_is_the_adapter_on_top_of_its_base(policy, merged):
    observations = _made_up(policy, 4)
    plain = Policy.load(str(merged), LoadOptions(task_suite=SUITE))
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
    assert names == kept | {"README.md"}
    card = (merged / "README.md").read_text()
    assert all(text in card for text in ("score: 0.75", str(base), "rank 4, alpha 8"))
    # The head is gone, since training changed what it reads; the number of images, once found out by it, is not.
    assert (after.num_images, after.uses_proprio, after.action_head_file) == (2, True, None)


def test_looks_travel_from_run_to_run_and_into_the_merged_folder(base, adapter, merged, tmp_path):
    assert (inspect_checkpoint(base).looks, inspect_checkpoint(merged).looks) == ((), ("official",))
    further = Policy.load(str(adapter), LoadOptions(task_suite=SUITE))
    assert further.info.looks == ("official",)
    further.save_adapter(tmp_path / "further", looks="lowpoly")
    merge(tmp_path / "further", tmp_path / "out")
    assert inspect_checkpoint(tmp_path / "out").looks == ("lowpoly", "official")


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 2, 2)])
def test_merged_weight_is_the_closed_form_in_float32(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    down = torch.randn(2, *shape[1:])
    up = torch.randn(6, 2, *([1, 1] if len(shape) == 4 else []))
    change = torch.einsum("or,r...->o...", up.flatten(1).double(), down.double())
    expected = (weight.double() + 4.0 * change).bfloat16()
    assert torch.equal(merged_weight(weight, down, up, 4.0), expected)


@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_adapters_of_the_bundled_policy_are_merged_although_rounding_decides_some_tokens(tmp_path, scale):
    bundled = Path(__file__).parents[1] / "checkpoints" / "tiny-libero-spatial"  # in bfloat16
    policy = _trained(bundled, scale, frozen_weights="bf16")
    policy.save_adapter(tmp_path / "adapter")
    assert "agree on 100.0%" in merge(tmp_path / "adapter", tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_projector_among_the_bases_weights_becomes_a_file(base, tmp_path):
    """As SimpleVLA-RL writes it."""
    other = shutil.copytree(base, tmp_path / "rl")
    path = other / "proprio_projector--latest_checkpoint.pt"
    state = torch.load(path, weights_only=True)
    path.unlink()
    shard = sorted(other.glob("*.safetensors"))[0]
    moved = {key.replace("module.", "proprio_projector."): tensor for key, tensor in state.items()}
    write_tensors(shard, load_file(shard) | moved)
    policy = _trained(other)
    policy.save_adapter(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "out")
    info = inspect_checkpoint(tmp_path / "out")
    assert not info.proprio_weights
    assert info.proprio_file is not None


# Refusals: no folder appears, and the message says what to do


def test_another_base_and_merging_twice_are_refused(adapter, merged, tmp_path):
    for other in (make_small_checkpoint(tmp_path / "other", seed=5), merged):
        with pytest.raises(BadInput, match="trained on other weights"):
            merge(adapter, tmp_path / "out", base=str(other))
    assert not (tmp_path / "out").exists()


def test_existing_output_folder_without_adapter_and_merged_folder_are_refused(
    adapter, base, merged, tmp_path
):
    with pytest.raises(BadInput, match="exists already"):
        merge(adapter, tmp_path)
    for folder in (base, merged):
        with pytest.raises(BadInput, match=r"holds no adapter_config\.json"):
            merge(folder, tmp_path / "out")


@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_wrong_merge_is_not_published_and_says_what_to_do(adapter, tmp_path, monkeypatch, factor):
    right = merge_module.merged_weight
    monkeypatch.setattr(
        merge_module, "merged_weight", lambda w, down, up, scale: right(w, down, up, factor * scale)
    )
    with pytest.raises(
        BadInput, match=r"agree on .* nothing was written; evaluate and use the adapter folder itself"
    ):
        merge(adapter, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shift", [0.6, 50.0, float("nan")])
def test_a_difference_as_large_as_what_training_changed_is_refused_though_no_token_is_clear(shift):
    unmerged = torch.zeros(1, 4, 256)
    merged = unmerged.clone()
    merged[..., 5] += shift
    with pytest.raises(BadInput, match=r"at most 5\.0e-01"):
        judge(unmerged, merged, unmerged + 1.0, torch.finfo(torch.bfloat16).eps)
