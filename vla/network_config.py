"""Read the sizes of a network from the config.json of an OpenVLA checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from transformers import LlamaConfig

from contracts import BadInput
from json_fields import read_fields
from vla.tokens import BOS_ID, EOS_ID, PAD_ID

# The text_config of a public checkpoint holds only fields that differ from these: the sizes of Llama-2 7B, and the
# rms_norm_eps that LlamaConfig had when OpenVLA was released. They are written out here, so that a changed default of
# the library cannot change what a checkpoint computes.
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "head_dim": None,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
DEFAULT_CHUNK_LENGTH = 8
MOST_LAYERS = 256


@dataclass(frozen=True)
class VitConfig:
    """The sizes of one vision transformer."""

    timm_id: str
    image_size: int
    overrides: dict[str, object]  # further keyword arguments of timm.create_model: the sizes of small models


@dataclass(frozen=True)
class NetworkConfig:
    """What config.json says about the network and its training."""

    vits: tuple[VitConfig, VitConfig]  # DINOv2, SigLIP
    llama: LlamaConfig
    num_images: int | None  # images per decision; None: the file does not say
    chunk_length: int  # actions per decision
    looks: tuple[str, ...]  # see CheckpointInfo


# Sizes are bounded, so that a damaged number cannot make the program build a network for hours.
_Size = Annotated[int, Field(ge=1, le=4096)]
_TimmId = Annotated[str, Field(pattern="^vit_")]  # timm looks up names with a prefix on the network


@dataclass
class _ConfigFields:
    """The fields of config.json that are read."""

    model_type: Literal["openvla"]
    timm_model_ids: tuple[_TimmId, _TimmId]
    image_sizes: tuple[_Size, _Size] = (224, 224)
    timm_override_act_layers: tuple[str | None, str | None] = (None, None)
    # Only this project's small checkpoints have this field.
    test_vit_overrides: tuple[dict[str, _Size], dict[str, _Size]] = ({}, {})
    text_config: dict[str, object] | None = None
    num_images_in_input: Annotated[int, Field(ge=1, le=3)] | None = None
    num_action_chunks: Annotated[int, Field(ge=1, le=256)] = DEFAULT_CHUNK_LENGTH
    looks: tuple[str, ...] = ()


def read_network_config(folder: Path) -> NetworkConfig:
    """Read a checkpoint folder's config.json. Raises BadInput when it does not describe an OpenVLA network."""
    path = folder / "config.json"
    fields = read_fields(path, _ConfigFields, "give an OpenVLA-OFT checkpoint")
    overrides: list[dict[str, object]] = []
    for activation, sizes in zip(fields.timm_override_act_layers, fields.test_vit_overrides, strict=True):
        overrides.append({"act_layer": activation, **sizes} if activation else {**sizes})
    dino, siglip = map(VitConfig, fields.timm_model_ids, fields.image_sizes, overrides)
    try:
        llama = _llama_config(fields.text_config or {})
    except Exception as error:  # transformers raises its own exceptions for fields of the wrong type
        raise BadInput(f"{path}: not a usable OpenVLA config ({type(error).__name__}: {error})") from error
    return NetworkConfig(
        vits=(dino, siglip),
        llama=llama,
        num_images=fields.num_images_in_input,
        chunk_length=fields.num_action_chunks,
        looks=fields.looks,
    )


def _llama_config(text_config: dict[str, Any]) -> LlamaConfig:
    """The language model's config: LLAMA_DEFAULTS, changed by the fields of a checkpoint's text_config."""
    known_fields = {
        name: value for name, value in text_config.items() if name in LLAMA_DEFAULTS and value is not None
    }
    fields = LLAMA_DEFAULTS | known_fields
    if fields["num_hidden_layers"] > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers: expected at most {MOST_LAYERS}")
    # JSON may hold 1 for 1.0, but transformers refuses an integer here.
    for name in ("rms_norm_eps", "rope_theta"):
        fields[name] = float(fields[name])
    # Always SDPA, because in some versions of transformers the eager and flash variants add a causal mask.
    return LlamaConfig(**fields, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa")
