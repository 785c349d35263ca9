"""config.json of a checkpoint folder: everything about the network's shape is read from here."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from transformers import LlamaConfig

from errors import BadInput
from untrusted.json_file import brief, read_json
from vla.prompt import PAD_ID

# Checkpoints name only what differs from these. They are Llama-2's sizes, but with the rms_norm_eps that LlamaConfig
# had when OpenVLA was released; written out here so that no library default can change what a checkpoint computes.
LLAMA_DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": PAD_ID,
}
# Of text_config, these too are architecture; the rest says how the file was written, or is fixed by this program.
_OPTIONAL = {"num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "bos_token_id",
             "eos_token_id"}  # fmt: skip
# (least, most) of what a real network has: beyond, a file is damaged, and building its network would take forever.
_LLAMA_LIMITS = {
    "vocab_size": (PAD_ID + 1, 1_000_000),
    "hidden_size": (1, 65_536),
    "intermediate_size": (1, 1_000_000),
    "num_hidden_layers": (1, 1_000),
    "num_attention_heads": (1, 1_000),
    "num_key_value_heads": (1, 1_000),
    "head_dim": (1, 65_536),
    "max_position_embeddings": (1, 10_000_000),
    "pad_token_id": (0, 1_000_000),
}
_VIT_LIMITS = {"patch_size": (1, 1_000), "embed_dim": (1, 65_536), "depth": (1, 1_000), "num_heads": (1, 1_000)}
_LARGEST_IMAGE = 4096


@dataclass(frozen=True)
class VitConfig:
    """One of the two vision transformers, as timm builds it."""

    timm_id: str
    image_size: int
    overrides: dict[str, Any]  # further keyword arguments of timm.create_model: sizes of small models


@dataclass(frozen=True)
class ModelConfig:
    vits: tuple[VitConfig, VitConfig]  # DINOv2, SigLIP
    llama: LlamaConfig
    num_images: int | None  # None: the file doesn't say
    chunk_length: int | None  # None: the file doesn't say


def read_model_config(folder: Path) -> ModelConfig:
    """Raises BadInput that names the file when it is missing, broken or of another kind of model."""
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("model_type") != "openvla":
        raise BadInput(
            f"{path}: model_type is {raw.get('model_type')!r}, expected 'openvla': give an OpenVLA-OFT checkpoint"
        )
    ids = raw.get("timm_model_ids")
    if not raw.get("use_fused_vision_backbone", True) or not isinstance(ids, list) or len(ids) != 2:
        raise BadInput(f"{path}: timm_model_ids is {brief(ids)}, expected two vision transformers (DINOv2 + SigLIP)")
    try:
        return ModelConfig(
            vits=_vit_configs(raw),
            llama=llama_config(raw.get("text_config", {})),
            num_images=_whole_number(raw, "num_images_in_input", 1, 3),
            chunk_length=_whole_number(raw, "num_action_chunks", 1, 1000),
        )
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise BadInput(f"{path}: not a usable OpenVLA config ({type(error).__name__}: {error})") from error


def _whole_number(raw: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = raw.get(name)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise ValueError(f"{name} is {brief(value)}, expected a number from {least} to {most}")
    return value


def _vit_configs(raw: dict[str, Any]) -> tuple[VitConfig, VitConfig]:
    sizes = raw.get("image_sizes", [224, 224])
    activations = raw.get("timm_override_act_layers", [None, None])
    overrides = raw.get("test_vit_overrides", [{}, {}])  # an addition of small checkpoints; real ones have none
    dino, siglip = (
        _vit_config(raw["timm_model_ids"][i], sizes[i], activations[i], dict(overrides[i])) for i in range(2)
    )
    if dino.image_size != siglip.image_size:
        raise ValueError(f"image_sizes is {brief(sizes)}, expected one size twice")
    return dino, siglip


def _vit_config(timm_id: Any, image_size: Any, activation: Any, overrides: dict[str, Any]) -> VitConfig:
    """Raises ValueError for anything but a vision transformer that timm knows, in sizes of its own.

    timm would take other names for models to download, and other keyword arguments for files to load.
    """
    if not isinstance(timm_id, str) or not timm_id.startswith("vit_") or not timm.is_model(timm_id):
        raise ValueError(f"timm_model_ids names {brief(timm_id)}, which is no vision transformer of timm")
    _whole_number({"image_sizes": image_size}, "image_sizes", 1, _LARGEST_IMAGE)
    if unknown := sorted(overrides.keys() - _VIT_LIMITS):
        raise ValueError(f"test_vit_overrides has {brief(unknown)}, expected no more than {', '.join(_VIT_LIMITS)}")
    for name, (least, most) in _VIT_LIMITS.items():
        _whole_number(overrides, name, least, most)
    return VitConfig(timm_id, image_size, ({"act_layer": activation} if activation else {}) | overrides)


def llama_config(text_config: dict[str, Any]) -> LlamaConfig:
    """text_config of the checkpoint, completed with LLAMA_DEFAULTS. Raises ValueError for what is no architecture."""
    known = LLAMA_DEFAULTS.keys() | _OPTIONAL
    given = {key: value for key, value in text_config.items() if key in known and value is not None}
    for name, (least, most) in _LLAMA_LIMITS.items():
        _whole_number(given, name, least, most)
    for name in ("rms_norm_eps", "rope_theta"):
        if not 0 < given.get(name, 1.0) < math.inf:
            raise ValueError(f"{name} is {brief(given[name])}, expected a positive number")
    if "rope_theta" not in given and "rope_parameters" not in given:
        given["rope_theta"] = 10000.0
    values: dict[str, Any] = LLAMA_DEFAULTS | given
    heads = values["num_attention_heads"]
    if values["hidden_size"] % heads or heads % values.get("num_key_value_heads", heads):
        raise ValueError(f"hidden_size {values['hidden_size']} does not divide into {heads} heads")
    # SDPA is fixed: the eager and flash variants add a causal mask of their own in some versions of transformers.
    return LlamaConfig(**values, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa")
