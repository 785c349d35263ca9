"""Grow a small OpenVLA-OFT network into a larger one that computes the same function (Net2Net, Chen et al. 2016).

A full-size network with random weights has no success from which reinforcement learning could start. A grown one has
the success of the small policy that it was grown from, at the cost, memory and numerics of the full size. Five rules:

* The values of a residual stream of width d are repeated R times, so that its new width is R d. LayerNorm and RMSNorm
  do not notice. What writes to a stream repeats its rows. What reads one repeats its columns and divides them by R.
* Heads, and the values in a head, come first among those of the larger attention; behind them are zeros. Scaled
  dot-product attention divides by the square root of the head's size, so queries are multiplied by its growth. Llama's
  heads must have their true size already, because the rotary frequencies depend on it.
* Hidden units of the MLPs come first; behind them are zeros.
* Blocks that the small network lacks write nothing: their output maps are zero. All their other weights stay random.
  The last block of the small language model becomes the last of the large one, because that one is computed at the
  action positions alone.
* The last block of a vision transformer is never computed, so it keeps what it was built with.

`add_noise` then makes all weights dense, because zeros and equal copies would flatter timings and give adapters
nothing to learn in the new directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vla.model import OpenVLAOFT

# How a dimension of a weight is enlarged: the copies of a stream that is written or read, heads, query, key and value
# heads in one matrix, or zeros behind what there is. None: it keeps its size.
How = Literal["written", "read", "heads", "qkv", "zeros"] | None
Rules: TypeAlias = Mapping[str, tuple[How, How]]  # name of a module -> rows (biases and norms, too), columns

VISION_BLOCK: Rules = {
    "norm1": ("written", None),
    "norm2": ("written", None),
    "ls1": ("written", None),  # LayerScale, whose weights only DINOv2 has
    "ls2": ("written", None),
    "attn.qkv": ("qkv", "read"),
    "attn.proj": ("written", "heads"),
    "mlp.fc1": ("zeros", "read"),
    "mlp.fc2": ("written", "zeros"),
}
LLAMA_LAYER: Rules = {
    "input_layernorm": ("written", None),
    "post_attention_layernorm": ("written", None),
    "self_attn.q_proj": ("heads", "read"),
    "self_attn.k_proj": ("heads", "read"),
    "self_attn.v_proj": ("heads", "read"),
    "self_attn.o_proj": ("written", "heads"),
    "mlp.gate_proj": ("zeros", "read"),
    "mlp.up_proj": ("zeros", "read"),
    "mlp.down_proj": ("written", "zeros"),
}
LANGUAGE_MODEL: Rules = {
    "model.embed_tokens": (None, "written"),
    "model.norm": ("written", None),
    "lm_head": (None, "read"),
}
PROJECTOR: Rules = {
    "fc2": ("written", "zeros"),
    "fc3": ("written", "read"),
}  # without fc1, which reads two streams
PROPRIO_PROJECTOR: Rules = {"fc1": ("written", None), "fc2": ("written", "read")}


@dataclass(frozen=True)
class Heads:
    """The sizes of an attention layer in the small and in the large network."""

    small_count: int
    small_size: int  # values in a head
    count: int
    size: int


def enlarge(weight: Tensor, dim: int, size: int, how: How, heads: Heads | None = None) -> Tensor:
    """The weight with `size` places in dimension `dim`."""
    if how is None:
        return weight
    if how in ("written", "read"):
        repeats = size // weight.shape[dim]
        copies = torch.cat([weight] * repeats, dim)
        return copies if how == "written" else copies / repeats
    if how == "zeros":
        shape = list(weight.shape)
        shape[dim] = size
        extended = weight.new_zeros(shape)
        extended.narrow(dim, 0, weight.shape[dim]).copy_(weight)
        return extended
    assert heads is not None
    if how == "heads":
        separate = weight.unflatten(dim, (heads.small_count, heads.small_size))
        larger = enlarge(enlarge(separate, dim, heads.count, "zeros"), dim + 1, heads.size, "zeros")
        return larger.flatten(dim, dim + 1)
    query, *key_and_value = weight.chunk(3, dim)
    scaled = [query * math.sqrt(heads.size / heads.small_size), *key_and_value]
    return torch.cat([enlarge(part, dim, size // 3, "heads", heads) for part in scaled], dim)


def grow_modules(small: nn.Module, large: nn.Module, rules: Rules, heads: Heads | None = None) -> None:
    """Fill the modules that the rules name."""
    for name, (rows, columns) in rules.items():
        for part, weight in small.get_submodule(name).named_parameters(recurse=False):
            target = large.get_submodule(name).get_parameter(part)
            grown = enlarge(weight, 0, target.shape[0], rows, heads)
            if weight.ndim == 2:
                grown = enlarge(grown, 1, target.shape[1], columns, heads)
            target.copy_(grown)


def silence(*output_maps: nn.Linear) -> None:
    """A block whose output maps are zero adds nothing to its stream."""
    for output_map in output_maps:
        for parameter in output_map.parameters():
            parameter.zero_()


@torch.no_grad()
def grow(small: OpenVLAOFT, large: OpenVLAOFT) -> None:
    """Fill `large` so that it computes what `small` does. Both are without adapters, and of sizes that fit."""
    for name in ("featurizer", "fused_featurizer"):
        grow_vision_transformer(getattr(small.vision_backbone, name), getattr(large.vision_backbone, name))
    grow_projector(small, large)
    if small.proprio_projector is not None and large.proprio_projector is not None:
        grow_modules(small.proprio_projector, large.proprio_projector, PROPRIO_PROJECTOR)
    grow_language_model(small, large)


def grow_vision_transformer(small: VisionTransformer, large: VisionTransformer) -> None:
    for name in ("cls_token", "reg_token", "pos_embed"):
        tokens = getattr(small, name)
        if tokens is not None:
            getattr(large, name).copy_(enlarge(tokens, 2, large.embed_dim, "written"))
    grow_modules(small, large, {"patch_embed.proj": ("written", None)})
    computed_blocks = small.blocks[:-1]
    for index, block in enumerate(large.blocks[:-1]):
        if index < len(computed_blocks):
            attention = computed_blocks[index].attn
            heads = Heads(attention.num_heads, attention.head_dim, block.attn.num_heads, block.attn.head_dim)
            grow_modules(computed_blocks[index], block, VISION_BLOCK, heads)
        else:
            silence(block.attn.proj, block.mlp.fc2)


def grow_projector(small: OpenVLAOFT, large: OpenVLAOFT) -> None:
    """It reads both vision streams side by side and writes to the language model's."""
    grow_modules(small.projector, large.projector, PROJECTOR)
    fc1 = large.projector.fc1
    parts = small.projector.fc1.weight.split(vision_widths(small), dim=1)
    widths = vision_widths(large)
    columns = [enlarge(part, 1, width, "read") for part, width in zip(parts, widths, strict=True)]
    fc1.weight.copy_(enlarge(torch.cat(columns, 1), 0, fc1.out_features, "zeros"))
    fc1.bias.copy_(enlarge(small.projector.fc1.bias, 0, fc1.out_features, "zeros"))


def vision_widths(network: OpenVLAOFT) -> list[int]:
    vision = network.vision_backbone
    return [vision.featurizer.embed_dim, vision.fused_featurizer.embed_dim]


def grow_language_model(small: OpenVLAOFT, large: OpenVLAOFT) -> None:
    small_config = small.language_model.config
    config = large.language_model.config
    heads = Heads(
        small_config.num_attention_heads, small_config.head_dim, config.num_attention_heads, config.head_dim
    )
    grow_modules(small.language_model, large.language_model, LANGUAGE_MODEL)
    *first_layers, last_layer = small.language_model.model.layers
    large_layers = large.language_model.model.layers
    for index, layer in enumerate(large_layers):
        if index < len(first_layers):
            grow_modules(first_layers[index], layer, LLAMA_LAYER, heads)
        elif index == len(large_layers) - 1:
            grow_modules(last_layer, layer, LLAMA_LAYER, heads)
        else:
            silence(layer.self_attn.o_proj, layer.mlp.down_proj)


def sizes_fit(small: OpenVLAOFT, large: OpenVLAOFT) -> bool:
    """Whether `small` can be grown into `large`, also on the meta device.

    Numbers of blocks, heads and hidden units are not checked: no small network has more of them than a 7B.
    """
    config = small.language_model.config
    large_config = large.language_model.config
    widths = [*vision_widths(small), config.hidden_size]
    large_widths = [*vision_widths(large), large_config.hidden_size]
    patches = small.vision_backbone.featurizer.patch_embed
    large_patches = large.vision_backbone.featurizer.patch_embed
    return (
        all(large_width % width == 0 for width, large_width in zip(widths, large_widths, strict=True))
        and patches.img_size == large_patches.img_size
        and patches.patch_size == large_patches.patch_size
        and config.head_dim == large_config.head_dim
    )


@torch.no_grad()
def add_noise(network: nn.Module, share: float, generator: torch.Generator) -> None:
    """Add Gaussian noise to every weight of every matrix, so that none is zero or repeated.

    The noise of a matrix has the standard deviation `share` times the root mean square of its weights that are not
    zero: of 11,008 columns of a grown `down_proj` only some hundred hold weights, and noise that is small beside those
    would be lost in bfloat16. The function changes by less than `share`, because what reads a stream takes the mean
    over R copies, each with noise of its own. A silent map gets noise as if its rows had norm 1.

    Biases, norms and LayerScale stay as they are: adapters do not change them, and they cost no less time than others.
    """
    for parameter in network.parameters():
        if parameter.ndim < 2:
            continue
        weight = parameter.float()
        num_used = int(weight.count_nonzero())
        if num_used > 0:
            root_mean_square = weight.norm().item() / math.sqrt(num_used)
        else:
            root_mean_square = 1 / math.sqrt(parameter[0].numel())
        noise = torch.randn(weight.shape, generator=generator, device=weight.device)
        parameter.copy_(weight + share * root_mean_square * noise)
