"""Which small OpenVLA-OFT network can be grown into which large one (benchmarks/growing.py)."""

import re

from timm.models.vision_transformer import VisionTransformer
from transformers import LlamaConfig

from vla.model import OpenVLAOFT

# Fields of LlamaConfig that change what a layer computes and cannot be grown
UNCHANGED_LLAMA_FIELDS = (
    "vocab_size",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)


def check_sizes(small: OpenVLAOFT, large: OpenVLAOFT) -> None:
    """Raises ValueError for the first size by which `small` cannot be grown into `large`.

    Both may be on the meta device.
    """
    small_vision = small.vision_backbone
    large_vision = large.vision_backbone
    _check_vision_transformer("DINOv2", small_vision.featurizer, large_vision.featurizer)
    _check_vision_transformer("SigLIP", small_vision.fused_featurizer, large_vision.fused_featurizer)
    _check_language_model(small.language_model.config, large.language_model.config)


def _check_vision_transformer(name: str, small: VisionTransformer, large: VisionTransformer) -> None:
    small_input = _image_and_patch(small)
    large_input = _image_and_patch(large)
    if small_input != large_input:
        raise ValueError(f"{name} reads {small_input}, expected {large_input}")
    if _parameter_kinds(small) != _parameter_kinds(large):
        raise ValueError(f"{name} is another kind of vision transformer")
    growth(small.embed_dim, large.embed_dim, name)
    small_block = small.blocks[0]
    large_block = large.blocks[0]
    _check_not_larger(f"{name}'s blocks", len(small.blocks), len(large.blocks))
    _check_not_larger(f"{name}'s heads", small_block.attn.num_heads, large_block.attn.num_heads)
    _check_not_larger(f"{name}'s values in a head", small_block.attn.head_dim, large_block.attn.head_dim)
    small_hidden = small_block.mlp.fc1.out_features
    large_hidden = large_block.mlp.fc1.out_features
    _check_not_larger(f"{name}'s hidden units", small_hidden, large_hidden)


def _image_and_patch(vit: VisionTransformer) -> str:
    image_size = vit.patch_embed.img_size[0]
    patch_size = vit.patch_embed.patch_size[0]
    return f"images of {image_size} pixels in patches of {patch_size}"


def _parameter_kinds(vit: VisionTransformer) -> set[str]:
    """The names of its parameters without the number of the block."""
    return {re.sub(r"^blocks\.\d+", "blocks", name) for name, _ in vit.named_parameters()}


def _check_language_model(small: LlamaConfig, large: LlamaConfig) -> None:
    growth(small.hidden_size, large.hidden_size, "language model")
    for field in UNCHANGED_LLAMA_FIELDS:
        small_value = getattr(small, field)
        large_value = getattr(large, field)
        if small_value != large_value:
            raise ValueError(f"language model: {field} is {small_value}, expected {large_value}")
    for config in (small, large):
        if config.num_key_value_heads != config.num_attention_heads:
            raise ValueError("language model: every query head needs a key and value head of its own")
    _check_not_larger("the language model's layers", small.num_hidden_layers, large.num_hidden_layers)
    _check_not_larger("the language model's heads", small.num_attention_heads, large.num_attention_heads)
    _check_not_larger("the language model's hidden units", small.intermediate_size, large.intermediate_size)


def _check_not_larger(name: str, small: int, large: int) -> None:
    if small > large:
        raise ValueError(f"{name}: {small}, expected at most {large}")


def growth(small: int, large: int, name: str) -> int:
    """How often a stream is repeated. Raises ValueError when the widths do not divide."""
    if large % small != 0:
        raise ValueError(f"{name}: a width of {large} is no multiple of {small}")
    return large // small
