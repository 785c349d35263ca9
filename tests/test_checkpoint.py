"""Folders of all public kinds, as other programs wrote them, read and written; unusable ones are explained."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from contracts import BadInput
from tests.small_checkpoint import load_policy
from vla.adapter_folder import WEIGHTS_FILE, base_and_adapter
from vla.checkpoint import inspect_checkpoint
from vla.dataset_statistics import STATISTICS_FILE
from vla.network_config import read_network_config
from vla.network_io import file_key, load_l1_head, load_network, save_network

GOLDEN = Path(__file__).parent / "golden" / "checkpoint"
CPU = torch.device("cpu")
PROPRIO = "proprio_projector--latest_checkpoint.pt"
ACTION_HEAD = "action_head--latest_checkpoint.pt"
# What config.json of the public checkpoints says about the network.
PUBLIC_CONFIG = {
    "model_type": "openvla",
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "image_sizes": [224, 224],
    "use_fused_vision_backbone": True,
    "text_config": {
        "model_type": "llama",
        "pad_token_id": 32000,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    },
}


def load(folder: Path, dtype: torch.dtype = torch.float32):
    return load_network(inspect_checkpoint(folder), 56, CPU, dtype)


@pytest.fixture
def folder(small, tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(small, tmp_path / "checkpoint")


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or add tensors of a folder; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


# What a folder is


def kind_images_and_proprio(folder: Path) -> tuple[str, int, bool]:
    info = inspect_checkpoint(folder)
    return info.kind, info.num_images, info.uses_proprio


def test_regression_and_token_checkpoints_are_recognised(tmp_path):
    assert kind_images_and_proprio(GOLDEN) == ("L1 regression", 2, True)
    assert list(inspect_checkpoint(GOLDEN).statistics) == ["libero_tiny_no_noops"]
    token_folder = shutil.copytree(GOLDEN, tmp_path / "token", ignore=shutil.ignore_patterns("*.pt"))
    assert kind_images_and_proprio(token_folder) == ("action tokens", 1, False)


def test_checkpoint_after_rl_has_its_proprio_projector_among_the_weights(tmp_path):
    folder = shutil.copytree(GOLDEN, tmp_path / "rl", ignore=shutil.ignore_patterns("*.pt"))
    projector = load(GOLDEN).proprio_projector.state_dict()
    edit_weights(folder, **{f"proprio_projector.{name}": x.bfloat16() for name, x in projector.items()})
    assert kind_images_and_proprio(folder) == ("action tokens, after RL", 1, True)
    loaded = load(folder).proprio_projector.state_dict()
    assert all(torch.equal(loaded[name], projector[name].bfloat16().float()) for name in projector)


def test_a_number_of_images_that_nothing_states_is_called_assumed_and_an_adapter_keeps_the_one_it_was_trained_with(
    folder, tmp_path
):
    config = json.loads((folder / "config.json").read_text())
    del config["num_images_in_input"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "assumed" in inspect_checkpoint(folder).reads
    policy = load_policy(folder, num_images=3)
    assert policy.info.reads == "3 image(s) and proprio"
    policy.save_adapter(tmp_path / "adapter")
    assert load_policy(tmp_path / "adapter").info.reads == "3 image(s) and proprio"


def test_adapter_that_a_pointer_names_is_found_with_its_base(small, tmp_path):
    (tmp_path / "step_8").mkdir()
    (tmp_path / "step_8" / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/name"}')
    (tmp_path / "best").write_text("step_8")
    assert base_and_adapter(str(tmp_path / "best")) == ("owner/name", str(tmp_path / "step_8"))
    for no_adapter in (str(small), "owner/name"):
        assert base_and_adapter(no_adapter) == (no_adapter, None)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_8\n")
    for run in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(BadInput, match=str(tmp_path / "checkpoints" / "best")):
            base_and_adapter(str(run))


def test_statistics_around_an_adapter_of_openvla_ofts_training_are_found(small, tmp_path):
    adapter = tmp_path / "run--10_chkpt" / "lora_adapter"
    load_policy(small).save_adapter(adapter)
    stored = json.loads((adapter / STATISTICS_FILE).read_text())
    (adapter / STATISTICS_FILE).unlink()
    stored["libero_spatial_no_noops"]["action"]["q99"][0] = 7.0
    (adapter.parent / STATISTICS_FILE).write_text(json.dumps(stored))

    def scale() -> float:
        info = inspect_checkpoint(small, adapter_folder=str(adapter))
        return info.statistics["libero_spatial_no_noops"].action.q99[0]

    assert scale() != 7.0  # an adapter of this program, whose own statistics are lost
    save_file(
        load_file(adapter / WEIGHTS_FILE), adapter / WEIGHTS_FILE
    )  # without metadata, as peft writes it
    assert scale() == 7.0


def test_public_checkpoints_are_llama_2_7b_with_their_own_epsilon(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC_CONFIG))
    config = read_network_config(tmp_path)
    llama = config.llama
    assert (llama.hidden_size, llama.intermediate_size, llama.num_hidden_layers) == (4096, 11008, 32)
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.vocab_size) == (32, 32, 32064)
    assert llama.rms_norm_eps == 1e-6
    assert llama.rope_parameters["rope_theta"] == 10000.0
    assert (config.num_images, config.chunk_length) == (None, 8)


# Reading and writing


def test_every_tensor_arrives_bit_identical_under_its_name():
    stored = load_file(GOLDEN / "model.safetensors")
    network = load(GOLDEN, torch.bfloat16)
    state = network.state_dict()
    loaded = {file_key(name): state[name] for name in state if not name.startswith("proprio_projector.")}
    torch.testing.assert_close(loaded, stored, rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    frequencies = network.language_model.model.rotary_emb.inv_freq  # stay float32; head_dim is 8
    assert frequencies.dtype == torch.float32
    np.testing.assert_allclose(frequencies, 10000.0 ** (-np.arange(4) / 4), rtol=1e-6)


def test_written_folder_has_the_keys_names_and_dtypes_of_the_format(tmp_path):
    config = json.loads((GOLDEN / "config.json").read_text())
    head = load_l1_head(inspect_checkpoint(GOLDEN), CPU, torch.bfloat16)
    save_network(tmp_path, load(GOLDEN), config, l1_head=head)
    same = partial(torch.testing.assert_close, rtol=0, atol=0)  # also the names and dtypes
    same(load_file(tmp_path / "model.safetensors"), load_file(GOLDEN / "model.safetensors"))
    for name in (PROPRIO, ACTION_HEAD):
        ours = torch.load(tmp_path / name, weights_only=True)
        theirs = torch.load(GOLDEN / name.replace("latest", "150000"), weights_only=True)
        same(dict(ours), dict(theirs))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_a_single_file_of_weights_comes_before_shards_as_in_transformers(folder):
    weights = load_file(folder / "model.safetensors")
    save_torch_state_dict(
        {name: tensor + 1 for name, tensor in weights.items()}, folder, max_shard_size=3_000_000
    )
    save_file(weights, folder / "model.safetensors")
    assert {tensor.path.name for tensor in inspect_checkpoint(folder).weights.values()} == {
        "model.safetensors"
    }


# Folders that cannot be used: one line names the file or the tensor

KEY = "language_model.model.layers.1.mlp.up_proj.weight"  # (24, 16)


def without_the_second_shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(tensors, folder, max_shard_size=3_000_000)
    sorted(folder.glob("*.safetensors"))[1].unlink()


def with_two_proprio_projectors(folder: Path) -> None:
    shutil.copyfile(folder / PROPRIO, folder / "proprio_projector--1_checkpoint.pt")


def with_two_arms(folder: Path) -> None:
    vector = dict.fromkeys(("min", "max", "q01", "q99"), [0.0] * 14)
    (folder / "dataset_statistics.json").write_text(json.dumps({"aloha": {"action": vector}}))
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_action_chunks", None)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_two_arms, "num_action_chunks"),
        (without_the_second_shard, "model-00002-of-"),
        (with_two_proprio_projectors, PROPRIO),
        ({KEY: torch.zeros(24, 17)}, KEY),
        ({KEY: None}, KEY),
        ({"value_head.weight": torch.zeros(1, 16)}, "value_head.weight"),
        ({"proprio_projector.fc1.bias": torch.zeros(16)}, PROPRIO),  # and the file
    ],
)
def test_unusable_folder_is_explained(folder, change, named):
    if isinstance(change, dict):
        edit_weights(folder, **change)
    else:
        change(folder)
    with pytest.raises(BadInput, match=named):
        load(folder)
