"""Merging an adapter into its base: what the folder holds, and what is refused."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard, save_torch_state_dict
from safetensors.torch import load_file

from contracts import BadInput, read_json, write_json
from tests.small_checkpoint import (
    BUNDLED,
    KINDS,
    load_policy,
    make_small_checkpoint,
    train_a_little,
    trained_policy,
)
from vla import merge as merge_module
from vla.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from vla.checkpoint import inspect_checkpoint
from vla.dataset_statistics import STATISTICS_FILE
from vla.merge import judge, merge, merged_weight
from vla.model_card import write_card
from vla.tokens import laplace_logits
from vla.weights import INDEX_FILE, write_tensors


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """With an L1 head and several shards."""
    folder = make_small_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint", l1_head=True)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(tensors, folder, max_shard_size=3_000_000)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "adapter"
    trained_policy(base, lora_alpha=8).save_adapter(folder, looks="official")
    return folder


@pytest.fixture(scope="module")
def merged(adapter, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("out") / "merged"
    assert "agree on 100.0%" in merge(adapter, out)
    return out


@pytest.mark.parametrize("kind", [KINDS[name] for name in ("all", "int8", "laplace_last_2_blocks")])
def test_merged_folder_is_the_adapter_on_top_of_its_base(base, observations, tmp_path, kind):
    trained_policy(base, lora_alpha=8, **kind).save_adapter(tmp_path / "adapter")
    policy = load_policy(tmp_path / "adapter", frozen_weights="float32")
    merge(tmp_path / "adapter", tmp_path / "merged")
    plain = load_policy(tmp_path / "merged", l1_student=kind.get("l1_student", "tokens"))
    expected = policy.chunk_logits(observations)
    torch.testing.assert_close(plain.chunk_logits(observations), expected, rtol=0, atol=1e-3)
    with policy.teacher():
        assert (policy.chunk_logits(observations) - expected).abs().max() > 0.1
    # The L1 head is left out where training has changed what it reads.
    assert (plain.l1_head is None) is not policy.is_laplace
    assert plain.num_images == policy.num_images


def test_merged_folder_is_a_plain_checkpoint_in_the_bases_shards_and_dtype(base, merged):
    before = inspect_checkpoint(base)
    after = inspect_checkpoint(merged)
    assert before.weights.keys() == after.weights.keys()
    for key, tensor in before.weights.items():
        other = after.weights[key]
        assert (tensor.path.name, tensor.dtype, tensor.shape) == (other.path.name, other.dtype, other.shape)
    assert read_json(base / INDEX_FILE) == read_json(merged / INDEX_FILE)
    names = {path.name for path in merged.iterdir()}
    copied = {path.name for path in base.iterdir()} - {"action_head--latest_checkpoint.pt"}
    assert names == copied | {"README.md"}


def test_merged_folder_has_one_set_of_statistics_that_of_the_adapter(base, tmp_path):
    statistics = read_json(base / STATISTICS_FILE)
    statistics["libero_spatial_no_noops"]["action"]["q99"][0] *= 2
    write_json(tmp_path / STATISTICS_FILE, statistics)
    trained_policy(base, statistics=str(tmp_path)).save_adapter(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "out")
    stored = read_json(tmp_path / "out" / STATISTICS_FILE)["libero_spatial_no_noops"]
    assert stored == statistics["libero_spatial_no_noops"]
    assert read_json(tmp_path / "out" / "config.json")["norm_stats"]["libero_spatial_no_noops"] == stored

    trained_policy(base, unnorm_key="libero_goal_no_noops").save_adapter(tmp_path / "goal")
    merge(tmp_path / "goal", tmp_path / "goal-merged")
    assert inspect_checkpoint(tmp_path / "goal-merged").statistics.keys() == {"libero_goal_no_noops"}

    (tmp_path / "adapter" / STATISTICS_FILE).unlink()  # the base's would scale every action wrongly
    with pytest.raises(BadInput, match="no statistics that scale as in the training"):
        merge(tmp_path / "adapter", tmp_path / "other")


def test_the_card_repeats_the_licence_of_the_base(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    write_card(tmp_path, "merged", "owner/name", tmp_path, SimpleNamespace(rank=4, alpha=8))
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.base_model) == ("mit", "owner/name")


def test_looks_travel_from_run_to_run_and_into_the_merged_folder(base, adapter, merged, tmp_path):
    assert [inspect_checkpoint(folder).looks for folder in (base, merged)] == [(), ("official",)]
    load_policy(adapter).save_adapter(tmp_path / "further", looks="lowpoly official")
    merge(tmp_path / "further", tmp_path / "out")
    assert inspect_checkpoint(tmp_path / "out").looks == ("lowpoly", "official")


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 2, 2)])
def test_merged_weight_is_the_closed_form_in_float32(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    lora_A = torch.randn(2, *shape[1:])
    lora_B = torch.randn(6, 2, *([1, 1] if len(shape) == 4 else []))
    change = torch.einsum("or,r...->o...", lora_B.flatten(1).double(), lora_A.double())
    expected = (weight.double() + 4.0 * change).bfloat16()
    assert torch.equal(merged_weight(weight, lora_A, lora_B, 4.0), expected)


@pytest.mark.parametrize("step", [0.0, 1e-3])
def test_adapters_of_the_bundled_policy_are_merged_although_rounding_decides_some_tokens(tmp_path, step):
    policy = load_policy(BUNDLED, lora_alpha=8, frozen_weights="bf16")  # the bundled weights are in bfloat16
    train_a_little(policy, step)
    policy.save_adapter(tmp_path / "adapter")
    assert "agree on 100.0%" in merge(tmp_path / "adapter", tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_projector_among_the_bases_weights_becomes_a_file(base, tmp_path):
    """As SimpleVLA-RL writes it."""
    other = shutil.copytree(base, tmp_path / "rl", ignore=shutil.ignore_patterns("proprio*"))
    state = torch.load(base / "proprio_projector--latest_checkpoint.pt", weights_only=True)
    shard = sorted(other.glob("*.safetensors"))[0]
    moved = {key.replace("module.", "proprio_projector."): tensor for key, tensor in state.items()}
    write_tensors(shard, load_file(shard) | moved)
    trained_policy(other).save_adapter(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "out")
    info = inspect_checkpoint(tmp_path / "out")
    assert not info.proprio_weights
    assert info.proprio_file is not None


def test_around_an_l1_head_a_token_that_rounding_moves_to_the_next_bin_is_no_contradiction():
    generator = torch.Generator().manual_seed(0)
    actions = 2 * torch.rand(8, 56, generator=generator) - 1
    rounded = actions + 0.004 * torch.randn(8, 56, generator=generator) ** 3
    unmerged, merged, untrained = map(laplace_logits, (actions, rounded, actions + 0.1))
    assert (unmerged.argmax(-1) != merged.argmax(-1)).float().mean() > 0.05
    judge(unmerged, merged, untrained, torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("change", [0.002, 0.02])  # 0.04 and 0.4 nats, less than what rounding may explain
def test_around_an_l1_head_a_merge_without_the_adapter_is_refused(change):
    actions = 2 * torch.rand(8, 56, generator=torch.Generator().manual_seed(0)) - 1
    unmerged, untrained = map(laplace_logits, (actions, actions + change))
    with pytest.raises(BadInput, match="untrained"):
        judge(unmerged, untrained, untrained, torch.finfo(torch.bfloat16).eps)


# What is refused: no folder appears


def test_another_base_and_merging_twice_are_refused(adapter, merged, tmp_path):
    moved = shutil.copytree(adapter, tmp_path / "adapter")
    config = read_json(moved / CONFIG_FILE)
    for other in (make_small_checkpoint(tmp_path / "other", seed=5), merged):
        write_json(moved / CONFIG_FILE, config | {"base_model_name_or_path": str(other)})
        with pytest.raises(BadInput, match="trained on other weights"):
            merge(moved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_cannot_identify_its_base_is_not_merged_into_where_it_already_is(
    adapter, merged, tmp_path
):
    run = shutil.copytree(merged, tmp_path / "run")
    peft_adapter = shutil.copytree(adapter, run / "lora_adapter")
    write_tensors(peft_adapter / WEIGHTS_FILE, load_file(peft_adapter / WEIGHTS_FILE))  # without fingerprint
    config = read_json(peft_adapter / CONFIG_FILE)
    write_json(peft_adapter / CONFIG_FILE, config | {"base_model_name_or_path": str(run)})
    with pytest.raises(BadInput, match="lies inside its base"):
        merge(peft_adapter, tmp_path / "out")


@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_wrong_merge_is_not_published(adapter, tmp_path, monkeypatch, factor):
    def wrongly_merged_weight(weight, lora_A, lora_B, scale):
        return merged_weight(weight, lora_A, lora_B, factor * scale)

    monkeypatch.setattr(merge_module, "merged_weight", wrongly_merged_weight)
    with pytest.raises(BadInput, match="nothing was written"):
        merge(adapter, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_merge_leaves_nothing_and_so_does_one_after_a_kill(adapter, tmp_path, monkeypatch):
    stale = tmp_path / "out.unfinished" / "model.safetensors"  # what a kill -9 leaves
    stale.parent.mkdir()
    stale.touch()

    def interrupt(shard, adapter):
        assert not stale.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(merge_module, "add_adapter", interrupt)
    with pytest.raises(KeyboardInterrupt):
        merge(adapter, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["vla.loading._load_networks", "vla.merge._logits"])
def test_a_merge_that_lacks_gpu_memory_advises_the_cpu(adapter, tmp_path, monkeypatch, step):
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    monkeypatch.setattr(step, run_out)
    monkeypatch.setattr(merge_module, "handle_stop_signals", lambda _: None)
    with pytest.raises(BadInput, match=r"out of GPU memory.*--device cpu"):
        merge_module.main(["--adapter", str(adapter), "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shift", [0.6, 50.0, float("nan")])
def test_a_difference_as_large_as_what_training_changed_is_refused_though_no_token_is_clear(shift):
    unmerged = torch.zeros(1, 4, 256)
    merged = unmerged.clone()
    merged[..., 5] += shift
    with pytest.raises(BadInput, match=r"at most 5\.0e-01"):
        judge(unmerged, merged, unmerged + 1.0, torch.finfo(torch.bfloat16).eps)
