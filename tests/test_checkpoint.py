"""Folders of all public kinds, as other programs wrote them, read and written; what is wrong with others, in one line.

The hub is played by a server in this process: it never answers.
"""

import json
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants, save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from contracts import BadInput
from vla import hub
from vla.checkpoint import base_and_adapter, inspect_checkpoint
from vla.hub import resolve_checkpoint
from vla.model_config import read_model_config
from vla.network_io import file_key, load_action_head, load_network, save_checkpoint

GOLDEN = Path(__file__).parent / "golden" / "checkpoint"
CPU = torch.device("cpu")
PROPRIO = "proprio_projector--latest_checkpoint.pt"


def _load(folder: Path, dtype: torch.dtype = torch.float32):
    return load_network(inspect_checkpoint(folder), 56, CPU, dtype)


@pytest.fixture
def folder(small, tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(small, tmp_path / "checkpoint")


def _edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_weights(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


# What a folder is


def test_regression_and_token_checkpoints_are_recognised(tmp_path):
    info = inspect_checkpoint(GOLDEN)
    assert (info.kind, info.num_images, info.uses_proprio) == ("L1 regression", 2, True)
    assert list(info.statistics) == ["libero_tiny_no_noops"]
    folder = shutil.copytree(GOLDEN, tmp_path / "token", ignore=shutil.ignore_patterns("*.pt"))
    info = inspect_checkpoint(folder)
    assert (info.kind, info.num_images, info.uses_proprio) == ("action tokens", 1, False)


def test_checkpoint_after_rl_has_its_proprio_projector_among_the_weights(tmp_path):
    folder = shutil.copytree(GOLDEN, tmp_path / "rl", ignore=shutil.ignore_patterns("*.pt"))
    projector = _load(GOLDEN).proprio_projector.state_dict()
    _edit_weights(
        folder, lambda t: t.update({f"proprio_projector.{k}": v.bfloat16() for k, v in projector.items()})
    )
    info = inspect_checkpoint(folder)
    assert (info.kind, info.num_images, info.uses_proprio) == ("action tokens, after RL", 1, True)
    loaded = _load(folder).proprio_projector.state_dict()
    assert all(torch.equal(loaded[key], projector[key].bfloat16().float()) for key in projector)


def test_config_decides_number_of_images_and_chunk_length(folder):
    assert inspect_checkpoint(folder).num_images == 2
    _edit_json(folder / "config.json", num_images_in_input=3, num_action_chunks=25)
    info = inspect_checkpoint(folder)
    assert (info.num_images, info.config.chunk_length) == (3, 25)
    assert inspect_checkpoint(folder, num_images=1).num_images == 1


# Reading and writing


def test_every_tensor_arrives_bit_identical_under_its_name():
    stored = load_file(GOLDEN / "model.safetensors")
    network = _load(GOLDEN, torch.bfloat16)
    loaded = {
        file_key(k): v for k, v in network.state_dict().items() if not k.startswith("proprio_projector.")
    }
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[key], stored[key]) for key in stored)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    frequencies = network.language_model.model.rotary_emb.inv_freq  # stay float32; head_dim is 8
    assert frequencies.dtype == torch.float32
    np.testing.assert_allclose(frequencies, 10000.0 ** (-np.arange(4) / 4), rtol=1e-6)


def test_written_folder_has_the_keys_names_and_dtypes_of_the_format(tmp_path):
    info = inspect_checkpoint(GOLDEN)
    config = json.loads((GOLDEN / "config.json").read_text())
    head = load_action_head(info, CPU, torch.bfloat16)
    save_checkpoint(tmp_path, _load(GOLDEN), config, action_head=head)
    for name in ("model.safetensors", PROPRIO, "action_head--latest_checkpoint.pt"):
        read = load_file if name.endswith("safetensors") else lambda path: torch.load(path, weights_only=True)
        ours, theirs = read(tmp_path / name), read(GOLDEN / name.replace("latest", "150000"))
        assert ours.keys() == theirs.keys()
        assert all(
            torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in theirs
        )
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((GOLDEN / name).read_text())


# Folders that cannot be used: one line that names the file, the key, what was expected and what was found

KEY = "language_model.model.layers.1.mlp.up_proj.weight"


def _two_shards_without_the_second(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(tensors, folder, max_shard_size=3_000_000)
    sorted(folder.glob("*.safetensors"))[1].unlink()


BROKEN = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["model.safetensors is missing"]),
    "missing shard": (_two_shards_without_the_second, ["model-00002-of-", "is missing"]),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 100_000), ["model.safetensors is not a whole"]),
    "missing tensor": (lambda f: _edit_weights(f, lambda t: t.pop(KEY)), ["found None", KEY]),
    "wrong shape": (
        lambda f: _edit_weights(f, lambda t: t.update({KEY: torch.zeros(24, 17)})),
        ["model.safetensors", KEY, "(24, 16)", "(24, 17)"],
    ),
    "other model": (lambda f: _edit_json(f / "config.json", model_type="llama"), ["config.json", "'llama'"]),
    "unknown vision transformer": (
        lambda f: _edit_json(f / "config.json", timm_model_ids=["vit_of_nobody", "vit_so400m_patch14_siglip_224"]),
        ["config.json", "vit_of_nobody"],
    ),
    "no statistics": (
        lambda f: ((f / "dataset_statistics.json").unlink(), _edit_json(f / "config.json", norm_stats={})),
        ["config.json", "statistics"],
    ),
    "two proprio projectors": (
        lambda f: shutil.copyfile(f / PROPRIO, f / "proprio_projector--1_checkpoint.pt"),
        ["several proprio_projector files", PROPRIO],
    ),
    "no proprio projector in its file": (
        lambda f: torch.save({"module.fc1.weight": torch.zeros(16, 8)}, f / PROPRIO),
        [PROPRIO, "not a ProprioProjector"],
    ),
    "FiLM": (lambda f: (f / "vision_backbone--1_checkpoint.pt").touch(), ["FiLM"]),
    "diffusion": (lambda f: (f / "noisy_action_projector--1_checkpoint.pt").touch(), ["diffusion"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_unusable_folder_is_explained(folder, name):
    break_folder, expected = BROKEN[name]
    break_folder(folder)
    with pytest.raises(BadInput) as caught:
        _load(folder)
    assert all(part in str(caught.value) for part in [*expected, str(folder)])


def test_action_head_of_another_kind_is_explained(folder):
    torch.save(
        {"module.noise_predictor.fc1.weight": torch.zeros(2)}, folder / "action_head--latest_checkpoint.pt"
    )
    with pytest.raises(BadInput, match="action_head--latest_checkpoint"):
        load_action_head(inspect_checkpoint(folder), CPU, torch.float32)


# Adapter folders


def test_adapter_that_a_pointer_names_is_found_with_its_base(small, tmp_path):
    (tmp_path / "step_8").mkdir()
    (tmp_path / "step_8" / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/name"}')
    (tmp_path / "best").write_text("step_8")
    assert base_and_adapter(str(tmp_path / "best"), None) == ("owner/name", str(tmp_path / "step_8"))
    for plain in (str(small), "owner/name"):
        assert base_and_adapter(plain, None) == (plain, None)


# config.json: sizes are read from it; defaults are those under which the public checkpoints were made

PUBLIC = {
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


def test_public_checkpoints_are_llama_2_7b_with_their_own_epsilon(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC))
    config = read_model_config(tmp_path)
    llama = config.llama
    assert (llama.hidden_size, llama.intermediate_size, llama.num_hidden_layers) == (4096, 11008, 32)
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.vocab_size) == (32, 32, 32064)
    assert llama.rms_norm_eps == 1e-6
    assert llama.rope_parameters["rope_theta"] == 10000.0
    assert not llama.tie_word_embeddings
    assert [vit.image_size for vit in config.vits] == [224, 224]
    assert (config.num_images, config.chunk_length) == (None, 8)


# The hub


@pytest.fixture
def silent_hub(monkeypatch):
    """A hub that takes connections and sends nothing. Gives a function: whether anybody has come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

        def was_asked() -> bool:
            try:
                server.accept()[0].close()
            except BlockingIOError:
                return False
            return True

        yield was_asked


def _cache_snapshot(tmp_path, monkeypatch, files):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--policy"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for name, content in files.items():
        (snapshot / name).write_text(content)
    return snapshot


def test_local_path_is_looked_up_without_network(tmp_path, silent_hub):
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    for name in ("/no/such/folder", "./missing", "runs/a/checkpoints/best"):
        with pytest.raises(BadInput, match="no such folder"):
            resolve_checkpoint(name)
    assert not silent_hub()


def test_complete_snapshot_in_the_cache_needs_no_network(tmp_path, silent_hub, monkeypatch):
    snapshot = _cache_snapshot(tmp_path, monkeypatch, {"config.json": "{}", "model.safetensors": ""})
    assert resolve_checkpoint("someone/policy") == snapshot
    assert not silent_hub()


def test_unreachable_hub_is_one_line_that_says_what_to_do(tmp_path, silent_hub, monkeypatch):
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    # A snapshot that lacks a shard is not taken for complete.
    index = (
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    )
    _cache_snapshot(
        tmp_path, monkeypatch, {"model.safetensors.index.json": index, "model-00001-of-00002.safetensors": ""}
    )
    with pytest.raises(BadInput, match=r"someone/policy.*give a local folder"):
        resolve_checkpoint("someone/policy")
    assert silent_hub()  # it was asked, and given up within the timeout
