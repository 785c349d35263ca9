"""Read the sizes of a network from the config.json of an OpenVLA checkpoint."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from transformers import LlamaConfig

from contracts import BadInput, read_fields
from vla.tokens import PAD_ID

# The text_config of a public checkpoint holds only fields that differ from Llama-2 7B with these. They are written out,
# because a changed default of the library would change what a checkpoint computes.
LLAMA_DEFAULTS = {"vocab_size": 32064, "pad_token_id": PAD_ID, "rms_norm_eps": 1e-6}
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
        # Always SDPA, because in some versions of transformers the eager and flash variants add a causal mask.
        fixed = {"tie_word_embeddings": False, "use_cache": False, "attn_implementation": "sdpa"}
        self.llama = LlamaConfig(**(LLAMA_DEFAULTS | self.text_config | fixed))


def read_network_config(folder: Path) -> NetworkConfig:
    """Read a checkpoint folder's config.json. Raises BadInput when it does not describe an OpenVLA network."""
    if not (folder / "config.json").is_file():
        advice = "give the folder of an OpenVLA-OFT checkpoint, or RUN/checkpoints/best"
        raise BadInput(f"checkpoint {folder}: has no config.json: {advice}")
    return read_fields(folder / "config.json", NetworkConfig, "give an OpenVLA-OFT checkpoint")
