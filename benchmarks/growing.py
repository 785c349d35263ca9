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
nothing to learn in the new directions. The large network may have any dtype: what it gets is computed in the small
one's, weight by weight, and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from vla.model import L1RegressionHead, OpenVLAOFT, Projector, ProprioProjector


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer."""

    count: int
    size: int  # values in a head


def write_to_stream(weight: Tensor, repeats: int) -> Tensor:
    """(out, ...) -> (repeats * out, ...): every copy of the stream gets the same values. For biases and norms, too."""
    return weight.repeat(repeats, *[1] * (weight.ndim - 1))


def read_from_stream(weight: Tensor, repeats: int) -> Tensor:
    """(out, in) -> (out, repeats * in): the mean over the copies of the stream."""
    return weight.repeat(1, repeats) / repeats


def put_first(weight: Tensor, size: int, dim: int) -> Tensor:
    """Extend dimension `dim` to `size` with zeros behind what is there."""
    shape = list(weight.shape)
    shape[dim] = size
    extended = weight.new_zeros(shape)
    extended.narrow(dim, 0, weight.shape[dim]).copy_(weight)
    return extended


def put_heads_first(weight: Tensor, small: Heads, large: Heads) -> Tensor:
    """(small.count * small.size, ...) -> (large.count * large.size, ...): each head at the front of a larger one."""
    extended = weight.new_zeros(large.count, large.size, *weight.shape[1:])
    extended[: small.count, : small.size] = weight.unflatten(0, (small.count, small.size))
    return extended.flatten(0, 1)


def check_sizes(small: OpenVLAOFT, large: OpenVLAOFT) -> None:
    """Raises ValueError for the first size by which `small` cannot be grown into `large`, also on the meta device.

    Numbers of blocks, heads and hidden units are not checked: no small network has more of them than a 7B.
    """
    small_vision = small.vision_backbone
    large_vision = large.vision_backbone
    for name in ("featurizer", "fused_featurizer"):
        small_vit = getattr(small_vision, name)
        large_vit = getattr(large_vision, name)
        growth(small_vit.embed_dim, large_vit.embed_dim, "vision transformer")
        small_input = (small_vit.patch_embed.img_size, small_vit.patch_embed.patch_size)
        large_input = (large_vit.patch_embed.img_size, large_vit.patch_embed.patch_size)
        if small_input != large_input:
            raise ValueError(f"vision transformer: image and patch of {small_input}, expected {large_input}")
    small_llama = small.language_model.config
    large_llama = large.language_model.config
    growth(small_llama.hidden_size, large_llama.hidden_size, "language model")
    if small_llama.head_dim != large_llama.head_dim:
        raise ValueError(f"language model: heads of {small_llama.head_dim}, expected {large_llama.head_dim}")


def growth(small: int, large: int, name: str) -> int:
    """How often a stream is repeated. Raises ValueError when the widths do not divide."""
    if large % small != 0:
        raise ValueError(f"{name}: a width of {large} is no multiple of {small}")
    return large // small


@torch.no_grad()
def grow(small: OpenVLAOFT, large: OpenVLAOFT) -> None:
    """Fill `large` so that it computes what `small` does. Both are without adapters, and of sizes that fit."""
    small_vision = small.vision_backbone
    large_vision = large.vision_backbone
    dino_repeats = grow_vision_transformer(small_vision.featurizer, large_vision.featurizer)
    siglip_repeats = grow_vision_transformer(small_vision.fused_featurizer, large_vision.fused_featurizer)
    llm_repeats = grow_language_model(small, large)
    dino_dim = small_vision.featurizer.embed_dim
    grow_projector(small.projector, large.projector, dino_dim, dino_repeats, siglip_repeats, llm_repeats)
    if small.proprio_projector is not None and large.proprio_projector is not None:
        grow_proprio_projector(small.proprio_projector, large.proprio_projector, llm_repeats)


def grow_vision_transformer(small: VisionTransformer, large: VisionTransformer) -> int:
    """Returns how often its stream is repeated."""
    repeats = growth(small.embed_dim, large.embed_dim, "vision transformer")
    for name in ("cls_token", "reg_token", "pos_embed"):
        small_tokens = getattr(small, name)
        if small_tokens is not None:
            getattr(large, name).copy_(small_tokens.repeat(1, 1, repeats))
    large.patch_embed.proj.weight.copy_(write_to_stream(small.patch_embed.proj.weight, repeats))
    large.patch_embed.proj.bias.copy_(write_to_stream(small.patch_embed.proj.bias, repeats))
    computed_blocks = small.blocks[:-1]
    for index, large_block in enumerate(large.blocks[:-1]):
        if index < len(computed_blocks):
            _grow_vision_block(computed_blocks[index], large_block, repeats)
        else:
            _silence(large_block.attn.proj, large_block.mlp.fc2)
    return repeats


def _grow_vision_block(small: nn.Module, large: nn.Module, repeats: int) -> None:
    for name in ("norm1", "norm2"):
        _grow_norm(getattr(small, name), getattr(large, name), repeats)
    for name in ("ls1", "ls2"):  # LayerScale, which only DINOv2 has
        if hasattr(getattr(small, name), "gamma"):
            getattr(large, name).gamma.copy_(write_to_stream(getattr(small, name).gamma, repeats))
    small_heads = Heads(small.attn.num_heads, small.attn.head_dim)
    large_heads = Heads(large.attn.num_heads, large.attn.head_dim)
    query_scale = math.sqrt(large_heads.size / small_heads.size)
    weights = []
    biases = []
    qkv_weights = read_from_stream(small.attn.qkv.weight, repeats).chunk(3)
    qkv_biases = small.attn.qkv.bias.chunk(3)
    for weight, bias, scale in zip(qkv_weights, qkv_biases, (query_scale, 1.0, 1.0), strict=True):
        weights.append(scale * put_heads_first(weight, small_heads, large_heads))
        biases.append(scale * put_heads_first(bias, small_heads, large_heads))
    large.attn.qkv.weight.copy_(torch.cat(weights))
    large.attn.qkv.bias.copy_(torch.cat(biases))
    mixed = put_heads_first(small.attn.proj.weight.T, small_heads, large_heads).T
    large.attn.proj.weight.copy_(write_to_stream(mixed, repeats))
    large.attn.proj.bias.copy_(write_to_stream(small.attn.proj.bias, repeats))
    hidden = large.mlp.fc1.out_features
    large.mlp.fc1.weight.copy_(put_first(read_from_stream(small.mlp.fc1.weight, repeats), hidden, dim=0))
    large.mlp.fc1.bias.copy_(put_first(small.mlp.fc1.bias, hidden, dim=0))
    large.mlp.fc2.weight.copy_(write_to_stream(put_first(small.mlp.fc2.weight, hidden, dim=1), repeats))
    large.mlp.fc2.bias.copy_(write_to_stream(small.mlp.fc2.bias, repeats))


def _grow_norm(small: nn.LayerNorm, large: nn.LayerNorm, repeats: int) -> None:
    large.weight.copy_(write_to_stream(small.weight, repeats))
    large.bias.copy_(write_to_stream(small.bias, repeats))


def _silence(*output_maps: nn.Linear) -> None:
    """A block whose output maps are zero adds nothing to its stream."""
    for output_map in output_maps:
        output_map.weight.zero_()
        if output_map.bias is not None:
            output_map.bias.zero_()


def grow_projector(
    small: Projector,
    large: Projector,
    dino_dim: int,
    dino_repeats: int,
    siglip_repeats: int,
    llm_repeats: int,
) -> None:
    """It reads both vision streams side by side and writes to the language model's."""
    dino_columns = read_from_stream(small.fc1.weight[:, :dino_dim], dino_repeats)
    siglip_columns = read_from_stream(small.fc1.weight[:, dino_dim:], siglip_repeats)
    hidden = large.fc1.out_features
    large.fc1.weight.copy_(put_first(torch.cat([dino_columns, siglip_columns], dim=1), hidden, dim=0))
    large.fc1.bias.copy_(put_first(small.fc1.bias, hidden, dim=0))
    large.fc2.weight.copy_(write_to_stream(put_first(small.fc2.weight, hidden, dim=1), llm_repeats))
    large.fc2.bias.copy_(write_to_stream(small.fc2.bias, llm_repeats))
    _grow_stream_map(small.fc3, large.fc3, llm_repeats)


def grow_proprio_projector(small: ProprioProjector, large: ProprioProjector, llm_repeats: int) -> None:
    large.fc1.weight.copy_(write_to_stream(small.fc1.weight, llm_repeats))
    large.fc1.bias.copy_(write_to_stream(small.fc1.bias, llm_repeats))
    _grow_stream_map(small.fc2, large.fc2, llm_repeats)


def _grow_stream_map(small: nn.Linear, large: nn.Linear, repeats: int) -> None:
    """A map from a repeated stream to a repeated stream."""
    large.weight.copy_(write_to_stream(read_from_stream(small.weight, repeats), repeats))
    large.bias.copy_(write_to_stream(small.bias, repeats))


def grow_language_model(small_network: OpenVLAOFT, large_network: OpenVLAOFT) -> int:
    """Returns how often its stream is repeated."""
    small = small_network.language_model
    large = large_network.language_model
    repeats = growth(small.config.hidden_size, large.config.hidden_size, "language model")
    large.model.embed_tokens.weight.copy_(small.model.embed_tokens.weight.repeat(1, repeats))
    large.lm_head.weight.copy_(read_from_stream(small.lm_head.weight, repeats))
    large.model.norm.weight.copy_(write_to_stream(small.model.norm.weight, repeats))
    *first_layers, last_layer = small.model.layers
    for index, large_layer in enumerate(large.model.layers):
        if index < len(first_layers):
            _grow_llama_layer(first_layers[index], large_layer, repeats)
        elif index == len(large.model.layers) - 1:
            _grow_llama_layer(last_layer, large_layer, repeats)
        else:
            _silence(large_layer.self_attn.o_proj, large_layer.mlp.down_proj)
    return repeats


def _grow_llama_layer(small: LlamaDecoderLayer, large: LlamaDecoderLayer, repeats: int) -> None:
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(large, name).weight.copy_(write_to_stream(getattr(small, name).weight, repeats))
    small_heads = _llama_heads(small)
    large_heads = _llama_heads(large)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = read_from_stream(getattr(small.self_attn, name).weight, repeats)
        getattr(large.self_attn, name).weight.copy_(put_heads_first(weight, small_heads, large_heads))
    mixed = put_heads_first(small.self_attn.o_proj.weight.T, small_heads, large_heads).T
    large.self_attn.o_proj.weight.copy_(write_to_stream(mixed, repeats))
    hidden = large.mlp.gate_proj.out_features
    for name in ("gate_proj", "up_proj"):
        weight = read_from_stream(getattr(small.mlp, name).weight, repeats)
        getattr(large.mlp, name).weight.copy_(put_first(weight, hidden, dim=0))
    large.mlp.down_proj.weight.copy_(
        write_to_stream(put_first(small.mlp.down_proj.weight, hidden, dim=1), repeats)
    )


def _llama_heads(layer: LlamaDecoderLayer) -> Heads:
    head_size = layer.self_attn.head_dim
    return Heads(layer.self_attn.q_proj.out_features // head_size, head_size)


@torch.no_grad()
def grow_action_head(small: L1RegressionHead, large: L1RegressionHead, llm_repeats: int) -> None:
    """The L1 head reads `action_dim` hidden states side by side, and has a residual stream of its own."""
    small_mlp = small.model
    large_mlp = large.model
    repeats = growth(small_mlp.fc1.out_features, large_mlp.fc1.out_features, "L1 head")

    def side_by_side(weight: Tensor) -> Tensor:
        """(..., action_dim * D) -> (..., action_dim * llm_repeats * D): the copies of one state stand together."""
        states = weight.unflatten(-1, (small.action_dim, 1, -1))
        return states.expand(*states.shape[:-2], llm_repeats, states.shape[-1]).flatten(-3)

    large_mlp.layer_norm1.weight.copy_(side_by_side(small_mlp.layer_norm1.weight))
    large_mlp.layer_norm1.bias.copy_(side_by_side(small_mlp.layer_norm1.bias))
    large_mlp.fc1.weight.copy_(write_to_stream(side_by_side(small_mlp.fc1.weight) / llm_repeats, repeats))
    large_mlp.fc1.bias.copy_(write_to_stream(small_mlp.fc1.bias, repeats))
    for small_block, large_block in zip(
        small_mlp.mlp_resnet_blocks, large_mlp.mlp_resnet_blocks, strict=True
    ):
        _grow_norm(small_block.ffn[0], large_block.ffn[0], repeats)
        _grow_stream_map(small_block.ffn[1], large_block.ffn[1], repeats)
    _grow_norm(small_mlp.layer_norm2, large_mlp.layer_norm2, repeats)
    large_mlp.fc2.weight.copy_(read_from_stream(small_mlp.fc2.weight, repeats))
    large_mlp.fc2.bias.copy_(small_mlp.fc2.bias)


@torch.no_grad()
def add_noise(network: nn.Module, share: float, generator: torch.Generator) -> None:
    """Add Gaussian noise to every weight of every matrix, so that none is zero or repeated.

    The noise of a matrix has the standard deviation `share` times the root mean square of its weights that are not
    zero. Zeros must not count: of 11,008 columns of a grown `down_proj` only some hundred hold weights, and noise that
    is small beside those weights would be lost when they are rounded to bfloat16, which has steps of 0.4 to 0.8 %. So
    copies become different from a share of about 0.01 on. The function changes by less than `share`, because what
    reads a stream takes the mean over R copies, each with noise of its own. A silent map gets noise as if its rows
    had norm 1.

    Convolutions, embeddings, class, register and position tokens are matrices, too. Biases, norms and LayerScale stay
    as they are: adapters do not change them, and their zeros and copies cost no less time than other values.
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
