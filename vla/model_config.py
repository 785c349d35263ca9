"""config.json of a checkpoint folder: everything about the network's shape is read from here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from errors import BadInput
from vla.json_file import read_json
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
# Of text_config, these say how the file was written, or are fixed by this program.
_NOT_ARCHITECTURE = {"model_type", "torch_dtype", "dtype", "transformers_version", "architectures", "_name_or_path",
                     "tie_word_embeddings", "use_cache", "_attn_implementation", "attn_implementation"}  # fmt: skip


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
    if not raw.get("use_fused_vision_backbone", True) or len(raw.get("timm_model_ids", [])) != 2:
        raise BadInput(
            f"{path}: timm_model_ids is {raw.get('timm_model_ids')}, expected two vision transformers (DINOv2 + SigLIP)"
        )
    try:
        return ModelConfig(
            vits=_vit_configs(raw),
            llama=llama_config(raw.get("text_config", {})),
            num_images=_whole_number(raw, "num_images_in_input", 3),
            chunk_length=_whole_number(raw, "num_action_chunks", 1000),
        )
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise BadInput(f"{path}: not a usable OpenVLA config ({type(error).__name__}: {error})") from error


def _whole_number(raw: dict[str, Any], name: str, most: int) -> int | None:
    value = raw.get(name)
    if value is not None and (not isinstance(value, int) or not 1 <= value <= most):
        raise ValueError(f"{name} is {value!r}, expected a number from 1 to {most}")
    return value


def _vit_configs(raw: dict[str, Any]) -> tuple[VitConfig, VitConfig]:
    sizes = raw.get("image_sizes", [224, 224])
    activations = raw.get("timm_override_act_layers", [None, None])
    overrides = raw.get("test_vit_overrides", [{}, {}])  # an addition of small checkpoints; real ones have none
    dino, siglip = (
        VitConfig(timm_id, sizes[i], ({"act_layer": activations[i]} if activations[i] else {}) | dict(overrides[i]))
        for i, timm_id in enumerate(raw["timm_model_ids"])
    )
    return dino, siglip


def llama_config(text_config: dict[str, Any]) -> LlamaConfig:
    """text_config of the checkpoint, completed with LLAMA_DEFAULTS."""
    given = {key: value for key, value in text_config.items() if key not in _NOT_ARCHITECTURE}
    if "rope_theta" not in given and "rope_parameters" not in given:
        given["rope_theta"] = 10000.0
    # SDPA is fixed: the eager and flash variants add a causal mask of their own in some versions of transformers.
    return LlamaConfig(
        **(LLAMA_DEFAULTS | given), tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa"
    )
