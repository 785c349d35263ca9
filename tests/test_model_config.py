"""Sizes are read from config.json; defaults are those under which the public checkpoints were made."""

import json

import pytest

from contracts import BadInput
from vla.checkpoint import llama_config, read_model_config

PUBLIC = {
    "model_type": "openvla",
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "image_sizes": [224, 224],
    "use_fused_vision_backbone": True,
    "text_config": {"model_type": "llama", "pad_token_id": 32000, "torch_dtype": "bfloat16", "vocab_size": 32064},
}


def _read(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC | changes))
    return read_model_config(tmp_path)


def test_public_checkpoints_are_llama_2_7b_with_their_own_epsilon(tmp_path):
    config = _read(tmp_path)
    llama = config.llama
    assert (llama.hidden_size, llama.intermediate_size, llama.num_hidden_layers) == (4096, 11008, 32)
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.vocab_size) == (32, 32, 32064)
    assert llama.rms_norm_eps == 1e-6
    assert llama.rope_parameters["rope_theta"] == 10000.0
    assert not llama.tie_word_embeddings
    assert [vit.image_size for vit in config.vits] == [224, 224]
    assert (config.num_images, config.chunk_length) == (None, None)


def test_everything_that_the_file_says_is_taken():
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    llama = llama_config({"rms_norm_eps": 1e-5, "rope_theta": 500.0} | heads)
    assert llama.rms_norm_eps == 1e-5
    assert llama.rope_parameters["rope_theta"] == 500.0
    assert (llama.num_attention_heads, llama.num_key_value_heads) == (8, 2)
    assert llama_config({"num_attention_heads": 8}).num_key_value_heads == 8


def test_vision_overrides_reach_timm(tmp_path):
    config = _read(
        tmp_path,
        image_sizes=[112, 112],
        test_vit_overrides=[{"depth": 3}, {"patch_size": 16}],
        timm_override_act_layers=["quick_gelu", None],
    )
    assert config.vits[0].overrides == {"act_layer": "quick_gelu", "depth": 3}
    assert config.vits[1].overrides == {"patch_size": 16}
    assert [vit.image_size for vit in config.vits] == [112, 112]


@pytest.mark.parametrize(
    "changes",
    [{"text_config": []}, {"image_sizes": [224]}, {"num_action_chunks": 0}, {"num_images_in_input": "two"}],
)
def test_unusable_values_name_the_file(tmp_path, changes):
    with pytest.raises(BadInput, match=r"config\.json: not a usable OpenVLA config"):
        _read(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"timm_model_ids": ["hf-hub:nobody/nothing", PUBLIC["timm_model_ids"][1]]},
        {"timm_model_ids": ["local-dir:/tmp", PUBLIC["timm_model_ids"][1]]},
        {"timm_model_ids": ["resnet50", PUBLIC["timm_model_ids"][1]]},
        {"test_vit_overrides": [{"checkpoint_path": "/tmp/any.pth"}, {}]},
        {"test_vit_overrides": [{"depth": 10**9}, {}]},
        {"text_config": {"num_hidden_layers": 10**15}},
        {"text_config": {"vocab_size": 100}},
        {"text_config": {"hidden_size": 100, "num_attention_heads": 3}},
        {"image_sizes": [224, 448]},
    ],
)
def test_nothing_is_downloaded_loaded_or_built_for_ever(tmp_path, changes):
    with pytest.raises(BadInput, match=r"config\.json: not a usable OpenVLA config"):
        _read(tmp_path, **changes)
