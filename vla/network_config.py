"""Read the sizes of a network from the config.json of an OpenVLA checkpoint."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from transformers import LlamaConfig

from contracts import read_fields
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
_TimmId = Annotated[str, Field(pattern="^vit_")]  # timm looks up names with a prefix on the network


@dataclass
class NetworkConfig:
    """What config.json says about the network and its training: the fields that are read.

    Tuples have one entry per vision transformer: DINOv2, SigLIP.
    """

    model_type: Literal["openvla"]
    timm_model_ids: tuple[_TimmId, _TimmId]
    image_sizes: tuple[int, int] = (224, 224)
    timm_override_act_layers: tuple[str | None, str | None] = (None, None)
    # Further sizes of small vision transformers. Only this project's checkpoints have this field.
    test_vit_overrides: tuple[dict[str, int], dict[str, int]] = ({}, {})
    text_config: dict[str, object] = field(default_factory=dict)
    # Images per decision; None: the file does not say
    num_images: Annotated[int | None, Field(alias="num_images_in_input")] = None
    # Actions per decision
    chunk_length: Annotated[int, Field(alias="num_action_chunks")] = 8
    looks: tuple[str, ...] = ()  # see CheckpointInfo

    def __post_init__(self) -> None:
        self.llama = _llama_config(self.text_config)


def read_network_config(folder: Path) -> NetworkConfig:
    """Read a checkpoint folder's config.json. Raises BadInput when it does not describe an OpenVLA network."""
    return read_fields(folder / "config.json", NetworkConfig, "give an OpenVLA-OFT checkpoint")


def _llama_config(text_config: dict[str, Any]) -> LlamaConfig:
    """The language model's config: LLAMA_DEFAULTS, changed by the fields of a checkpoint's text_config."""
    known_fields = {
        name: value for name, value in text_config.items() if name in LLAMA_DEFAULTS and value is not None
    }
    fields = LLAMA_DEFAULTS | known_fields
    # JSON may hold 1 for 1.0, but transformers refuses an integer here.
    for name in ("rms_norm_eps", "rope_theta"):
        fields[name] = float(fields[name])
    # Always SDPA, because in some versions of transformers the eager and flash variants add a causal mask.
    return LlamaConfig(**fields, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa")
