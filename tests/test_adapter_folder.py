"""The folder of an adapter: what is in it, that peft reads it, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from contracts import BadInput
from tests.small_checkpoint import (
    SUITE,
    load_policy,
    load_small_network,
    network_inputs,
    train_a_little,
    train_network_a_little,
)
from vla.adapter_folder import WEIGHTS_FILE, base_and_adapter, copy_into_network, read_adapter
from vla.model import ACTION_ROWS
from vla.weights import read_pt, write_pt

# Fields that peft 0.11.1 has, too. openvla-oft pins that version, which raises a TypeError for others.
FIELDS_OF_CONFIG = {
    "peft_type",
    "r",
    "lora_alpha",
    "init_lora_weights",
    "target_modules",
    "base_model_name_or_path",
    "inference_mode",
}


def change_config(adapter_folder: Path, **changes) -> None:
    path = adapter_folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def adapter_folder(small, tmp_path) -> Path:
    load_policy(small).save_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("trained_blocks", [None, 2])
def test_peft_itself_loads_the_saved_adapter(small_one_image, tmp_path, trained_blocks):
    policy = load_policy(small_one_image, lora_alpha=8, trained_blocks=trained_blocks)
    train_a_little(policy)
    policy.save_adapter(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text()).keys() == FIELDS_OF_CONFIG
    base = load_small_network(small_one_image)
    by_peft = PeftModel.from_pretrained(base, str(tmp_path))
    inputs = network_inputs()
    with torch.no_grad():
        logits, hidden = policy.network(*inputs)
        torch.testing.assert_close(by_peft(*inputs)[1], hidden)
        torch.testing.assert_close(base.language_model.lm_head(hidden).float()[..., ACTION_ROWS], logits)


def test_an_adapter_with_pefts_copy_of_the_head_is_read(small, adapter_folder):
    """As openvla-oft's training writes it, whose target_modules name lm_head by its last part."""
    path = adapter_folder / WEIGHTS_FILE
    head = load_small_network(small).language_model.lm_head.weight
    copy = {"base_model.model.language_model.lm_head.base_layer.weight": head.clone()}
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(path) | copy, path, metadata)
    load_policy(small).load_adapter(adapter_folder)


def test_an_adapter_keeps_the_key_that_its_training_was_given(small, tmp_path):
    load_policy(small, unnorm_key="libero_goal_no_noops").save_adapter(tmp_path / "given")
    load_policy(tmp_path / "given").save_adapter(tmp_path / "again")
    load_policy(small).save_adapter(tmp_path / "not_given")
    keys = [load_policy(tmp_path / name).unnorm_key for name in ("given", "again", "not_given")]
    assert keys == ["libero_goal_no_noops", "libero_goal_no_noops", "libero_spatial_no_noops"]
    assert load_policy(tmp_path / "given", unnorm_key="libero_10_no_noops").unnorm_key == "libero_10_no_noops"


@pytest.mark.parametrize("options", [{"lora_rank": 8}, {"lora_alpha": 16}, {"trained_blocks": 2}])
def test_adapter_of_another_rank_alpha_or_of_more_blocks_is_refused(adapter_folder, small, options):
    with pytest.raises(BadInput, match=str(adapter_folder)):
        load_policy(small, **options).load_adapter(adapter_folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"init_lora_weights": "pissa"},  # peft changes the base before it trains such an adapter
        {"peft_type": "LOHA"},
    ],
)
def test_adapter_of_another_kind_is_refused(adapter_folder, changes):
    change_config(adapter_folder, **changes)
    with pytest.raises(BadInput, match=str(adapter_folder)):
        read_adapter(adapter_folder)


def test_an_adapter_that_peft_wrote_is_read_and_maps_without_one_are_as_in_the_base(
    small_one_image, tmp_path
):
    network = load_policy(small_one_image).network
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj", "fc1", "patch_embed.proj"])
    by_peft = get_peft_model(load_small_network(small_one_image), config)
    with torch.no_grad():
        for name, parameter in by_peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    by_peft.save_pretrained(str(tmp_path))
    train_network_a_little(network)  # the values of another adapter, none of which may stay
    copy_into_network(read_adapter(tmp_path), network)
    with torch.no_grad():
        logits = network(*network_inputs())[1]
        expected = by_peft(*network_inputs())[1]
    # peft adds the adapter's output to a rounded one, and processors round differently.
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_base_is_named_by_the_adapter(adapter_folder, small):
    assert base_and_adapter(str(adapter_folder)) == (str(small), str(adapter_folder))
    assert base_and_adapter(str(small)) == (str(small), None)
    assert base_and_adapter("owner/name") == ("owner/name", None)
    for no_base in (None, str(small / "moved")):
        change_config(adapter_folder, base_model_name_or_path=no_base)
        with pytest.raises(BadInput, match=str(adapter_folder)):
            base_and_adapter(str(adapter_folder))


def test_a_head_that_openvla_oft_trained_beside_an_adapter_is_refused_by_name(adapter_folder):
    name = "proprio_projector--5000_checkpoint.pt"
    weights = adapter_folder / "adapter_model.safetensors"
    save_file(load_file(weights), weights)  # as another program writes it: without our metadata
    (adapter_folder.parent / name).touch()
    with pytest.raises(BadInput, match=name):
        load_policy(adapter_folder)


@pytest.mark.parametrize(
    "lost", ["adapter/proprio_projector.safetensors", "base/proprio_projector--latest_checkpoint.pt", "scale"]
)
def test_an_adapter_that_has_lost_a_part_of_its_policy_is_refused(small, tmp_path, lost):
    base = shutil.copytree(small, tmp_path / "base")
    demos = tmp_path / "demos"
    demos.mkdir()
    statistics = json.loads((small / "dataset_statistics.json").read_text())
    statistics[f"{SUITE}_no_noops"]["action"]["q99"][0] += 1
    (demos / "dataset_statistics.json").write_text(json.dumps(statistics))
    adapter = tmp_path / "adapter"
    load_policy(base, statistics=str(demos)).save_adapter(adapter)
    load_policy(adapter)
    (adapter / "dataset_statistics.json" if lost == "scale" else tmp_path / lost).unlink()
    with pytest.raises(BadInput, match=lost.partition("/")[0]):
        load_policy(adapter)


def test_an_adapter_is_refused_beside_another_l1_head_than_in_its_training(small, tmp_path):
    base = shutil.copytree(small, tmp_path / "base")
    adapter = tmp_path / "adapter"
    load_policy(base).save_adapter(adapter)
    (head,) = base.glob("action_head--*")
    state = read_pt(head)
    state["model.fc2.bias"][-1] += 1
    write_pt(head, state)
    with pytest.raises(BadInput, match="another L1 head"):
        load_policy(adapter)
