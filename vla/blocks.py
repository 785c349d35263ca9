"""The forward passes of the transformer blocks, on the parameters that transformers' and timm's modules hold.

Llama's blocks are written out because attention here is full, because q, k, v and gate, up may be one product each
(vla.lora), and because the last block is needed at the action positions only.
"""

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    apply_rotary_pos_emb,
)

from vla.lean_timm import VisionTransformer


def llama_block(
    block: LlamaDecoderLayer, hidden: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor, rows: Tensor | None
) -> Tensor:
    """(B, S, D) -> (B, S, D), or (B, A, D) at the positions `rows` (B, A) alone.

    mask (B, 1, 1, S) True where a key is real, None for all; cos and sin (1, S, head_dim).
    """
    attention, mlp = block.self_attn, block.mlp
    head_dim = attention.head_dim
    q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in _qkv(attention, block.input_layernorm(hidden)))
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    if rows is not None:
        hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        q = q.gather(2, rows[:, None, :, None].expand(-1, q.shape[1], -1, head_dim))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != q.shape[1])
    hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    gate, up = _gate_up(mlp, block.post_attention_layernorm(hidden))
    return hidden + mlp.down_proj(mlp.act_fn(gate) * up)


def _qkv(attention: LlamaAttention, x: Tensor) -> tuple[Tensor, ...]:
    if hasattr(attention, "qkv_proj"):  # vla.lora has put the three together
        return attention.qkv_proj(x).split(attention.qkv_proj.out_features, dim=-1)
    return attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)


def _gate_up(mlp: LlamaMLP, x: Tensor) -> tuple[Tensor, ...]:
    if hasattr(mlp, "gate_up_proj"):
        return mlp.gate_up_proj(x).split(mlp.gate_up_proj.out_features, dim=-1)
    return mlp.gate_proj(x), mlp.up_proj(x)


def vit_block(block: nn.Module, tokens: Tensor) -> Tensor:
    """(B, N, D) -> (B, N, D)"""
    return block(tokens)


def vit_tokens(vit: VisionTransformer, images: Tensor) -> Tensor:
    """What the first block reads: patches with their positions, after class and register tokens: (B, N, D)."""
    return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
