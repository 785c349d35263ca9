"""OpenVLA-OFT: two vision transformers, a projector and a Llama that decodes a whole action chunk in one pass.

The language model's input is, for a prompt of P ids (BOS first, EMPTY_TOKEN_ID last) and N image and proprio tokens,

    [BOS] [N image and proprio tokens] [prompt 1 .. P-1] [A zero vectors] [</s>]

with full attention between all of them. The logits of action token i are read one position BEFORE the i-th zero vector,
because training kept the next-token shift. So those of the first are read at the last prompt token. Outputs that nobody
reads are not computed: the last block of each vision transformer is skipped, and Llama's last block runs only at the A
positions that are read.

The network has two parts. The trunk turns observations into hidden states, the top turns these into logits. By default
the top is the whole language model. With `train_last_blocks(K)` it begins K blocks before the end, and the trunk is
frozen: its hidden states for an observation never change, so they can be kept and used again.

Attribute names are those of the reference model, so that checkpoint keys and LoRA targets agree. Source: openvla-oft
@213c5ff, prismatic/extern/hf/modeling_prismatic.py; stock timm and transformers, no remote code.
"""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from vla.adapters import FUSED_MAPS, AdaptedLayers
from vla.heads import L1RegressionHead, Projector, ProprioProjector
from vla.lora import LoraLinear
from vla.network_config import NetworkConfig
from vla.tokens import ACTION_TOKEN_IDS, EOS_ID, PAD_ID, laplace_logits
from vla.vision import FusedVisionBackbone, vit_block

log = logging.getLogger(__name__)
ACTION_ROWS = slice(ACTION_TOKEN_IDS.start, ACTION_TOKEN_IDS.stop)  # rows of lm_head: 31744..31999


def llama_block(
    block: LlamaDecoderLayer,
    hidden: Tensor,
    mask: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
) -> Tensor:
    """Run a block of the language model with full attention: (B, S, D) -> (B, S, D).

    mask (B, 1, 1, S): True where a key is not padding; None if there is no padding. cos and sin (1, S, head_dim).
    positions (B, A): compute the output only there, (B, A, D); None: everywhere.
    """
    attention = block.self_attn
    mlp = block.mlp
    head_dim = attention.head_dim
    normed = block.input_layernorm(hidden)
    qkv = _linear_maps(attention, "qkv_proj", normed)
    q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in qkv)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    if positions is not None:
        hidden = hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
        q = q.gather(2, positions[:, None, :, None].expand(-1, q.shape[1], -1, head_dim))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != q.shape[1])
    hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    normed = block.post_attention_layernorm(hidden)
    gate, up = _linear_maps(mlp, "gate_up_proj", normed)
    return hidden + mlp.down_proj(mlp.act_fn(gate) * up)


def _linear_maps(module: nn.Module, fused_name: str, x: Tensor) -> tuple[Tensor, ...]:
    """The outputs of several linear maps of x. If `vla.adapters` has joined them in layer `fused_name`, use that."""
    if hasattr(module, fused_name):
        layer = getattr(module, fused_name)
        return layer(x).split(layer.out_features, dim=-1)
    return tuple(getattr(module, name)(x) for name in FUSED_MAPS[fused_name])


def configure_compiler() -> None:
    """Set the options of torch.compile, which are the process's, for a compiled network."""
    # torch makes separate code for student and teacher, with and without gradient, for each prompt length, and for a
    # batch of 1; one code serves all larger batches (see `OpenVLAOFT.run_block`).
    torch._dynamo.config.recompile_limit = 64
    has_compiler = "CC" in os.environ or shutil.which("gcc") or shutil.which("clang")
    if not has_compiler or not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        log.warning(
            "compiling may fail: it needs gcc and Python.h (packages gcc and python3-dev), or use --compile off"
        )
    # Recompute cheap element-wise products in the backward pass: a quarter less memory for little time.
    torch._functorch.config.activation_memory_budget = 0.8
    # Also keep on the disk what torch has derived from `vla.lora`'s autograd functions. (Older versions lack this.)
    if hasattr(torch._functorch.config, "autograd_cache_allow_custom_autograd_functions"):
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True


class OpenVLAOFT(nn.Module):
    """The network. `vla.network_io` builds it under `torch.device("meta")` and then loads the weights."""

    adapters: AdaptedLayers  # set after `vla.adapters.add_lora` has added adapters to this network

    def __init__(self, config: NetworkConfig, num_action_tokens: int):
        super().__init__()
        self.num_action_tokens = num_action_tokens  # A
        self.vision_backbone = FusedVisionBackbone(config)
        vits = (self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer)
        vision_dim = sum(vit.embed_dim for vit in vits)
        self.projector = Projector(vision_dim, config.llama.hidden_size)
        self.language_model = LlamaForCausalLM(config.llama)
        self.proprio_projector: ProprioProjector | None = None
        # The frozen L1 head, if action tokens are drawn around its actions; None: the token head's logits are used
        self.l1_head: L1RegressionHead | None = None
        # The number of trained blocks of the language model above a frozen trunk; None: the trunk is trained, too.
        self.trained_blocks: int | None = None
        self._first_layer_of_top = 0
        self._count_blocks([*self.vision_backbone.computed_blocks, *self.language_model.model.layers])
        # How many blocks recompute their activations in the backward pass: the first ones of those in training. Vision
        # comes first, where recomputing saves the most memory for the time that it takes.
        self.recomputed_blocks = 0
        # Once memory has run out: the largest batches to try, by whether they learn (see `vla.memory`)
        self.largest_batches: dict[bool, int] = {}
        # The functions that run a block, or their compiled versions
        self._vit_block: Callable[..., Tensor] = vit_block
        self._llama_block: Callable[..., Tensor] = llama_block

    def train_last_blocks(self, count: int) -> None:
        """Freeze the trunk: all that comes before the last `count` blocks of the language model."""
        layers = self.language_model.model.layers
        self.trained_blocks = count
        self._first_layer_of_top = len(layers) - count
        self._count_blocks(layers[self._first_layer_of_top :])

    def frozen_parts(self) -> list[str]:
        """The names of the modules that a frozen trunk consists of; none if the trunk is trained, too."""
        if self.trained_blocks is None:
            return []
        layers = [f"language_model.model.layers.{index}" for index in range(self._first_layer_of_top)]
        return ["vision_backbone", "projector", *layers]

    def _count_blocks(self, trained: Iterable[nn.Module]) -> None:
        """Set `num_blocks`, the number of the blocks in training, and their places in the forward pass."""
        self._block_index = {block: index for index, block in enumerate(trained)}
        self.num_blocks = len(self._block_index)

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.model.embed_tokens.weight.dtype

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_blocks` was called."""
        return self._llama_block is not llama_block

    def compile_blocks(self) -> None:
        """Compile the blocks with torch.compile, which fuses their small operations; see `configure_compiler`."""
        self._vit_block = torch.compile(vit_block)
        self._llama_block = torch.compile(llama_block)

    def forward(
        self, pixel_values: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor | None, proprio: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Logits of the action tokens 31744..31999, (B, A, 256) float32, and the hidden states (B, A, D) behind them.

        pixel_values (B, 6 * images, S, S); prompt_ids (B, P), padded on the right; prompt_lengths (B,), None if no
        prompt is padded; proprio (B, proprio_dim) normalised, None without a proprio projector.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trained_blocks is None):
            hidden, lengths = self.trunk(pixel_values, prompt_ids, prompt_lengths, proprio)
        return self.top(hidden, lengths)

    def trunk(
        self, pixel_values: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor | None, proprio: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The hidden states (B, S, D) that enter the top, and the lengths (B,) of their rows without padding.

        The lengths are None if no row is padded. The arguments are those of `forward`.
        """
        embeddings, lengths = self.embed(pixel_values, prompt_ids, prompt_lengths, proprio)
        return self.run_layers(embeddings, lengths, end=self._first_layer_of_top), lengths

    def top(self, hidden: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """What `forward` returns, from what `trunk` returns."""
        positions = self.output_positions(hidden, lengths)
        hidden = self.run_layers(hidden, lengths, positions, first=self._first_layer_of_top)
        hidden = self.language_model.model.norm(hidden)
        return self.action_logits(hidden), hidden

    def embed(
        self, pixel_values: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor | None, proprio: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The language model's input (B, S, D), and the lengths (B,) of its rows; None if no prompt is padded.

        Worked example of the text for A = 2 and prompts of lengths (3, 2):

            b p p 0 0 /      b = BOS, p = prompt, 0 = zero vector, / = </s>, . = padding
            b p 0 0 / .
        """
        images = self.vision_backbone(pixel_values.to(self.dtype), self.run_block)
        parts = [self.projector(images)]
        if self.proprio_projector is not None:  # it is float32, whatever the network's dtype
            assert proprio is not None
            token = self.proprio_projector(proprio.to(self.proprio_projector.fc1.weight.dtype))
            parts.append(token[:, None].to(self.dtype))
        num_actions = self.num_action_tokens
        ids = F.pad(prompt_ids, (0, num_actions + 1), value=PAD_ID)
        longest = prompt_ids.shape[1]
        end_of_prompt = longest if prompt_lengths is None else prompt_lengths[:, None]
        offset = torch.arange(ids.shape[1], device=ids.device)[None] - end_of_prompt
        text = self.language_model.model.embed_tokens(ids.masked_fill(offset == num_actions, EOS_ID))
        text = text.masked_fill(((offset >= 0) & (offset < num_actions))[..., None], 0.0)
        embeddings = torch.cat([text[:, :1], *parts, text[:, 1:]], dim=1)
        if prompt_lengths is None:
            return embeddings, None
        return embeddings, prompt_lengths + (embeddings.shape[1] - longest)

    def output_positions(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        """The positions (B, A) int64 whose outputs give the action tokens; the first is the last prompt token's."""
        batch, longest, _ = hidden.shape
        ends = hidden.new_full((batch,), longest, dtype=torch.int64) if lengths is None else lengths
        num_actions = self.num_action_tokens
        first = ends - (num_actions + 2)  # after it come A zero vectors and </s>
        return first[:, None] + torch.arange(num_actions, device=hidden.device)

    def run_layers(
        self,
        hidden: Tensor,
        lengths: Tensor | None,
        positions: Tensor | None = None,
        first: int = 0,
        end: int | None = None,
    ) -> Tensor:
        """Run the language model's blocks from `first` to `end`: (B, S, D) -> (B, S, D); with `positions` (B, A, D).

        lengths (B,): of the rows without padding; None if there is none. positions (B, A): those that are read of what
        the model's last block computes, if it is among the blocks. That block computes no others.
        """
        llama = self.language_model.model
        # Padding comes last, so the positions of all other tokens are those of the unpadded sequence.
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        cos, sin = llama.rotary_emb(hidden, position_ids=position_ids)
        # Without padding there is no mask, so that SDPA uses its fastest kernel, as the reference does.
        mask = None if lengths is None else (position_ids < lengths[:, None])[:, None, None, :]
        for layer in llama.layers[first:end]:
            read_positions = positions if layer is llama.layers[-1] else None
            hidden = self.run_block(layer, hidden, mask, cos, sin, read_positions)
        return hidden

    def run_block(self, block: nn.Module, *arguments: Tensor | None) -> Tensor:
        """Run a block with the arguments of `llama_block` or `vit_block`, and keep or recompute its activations."""
        forward = self._llama_block if isinstance(block, LlamaDecoderLayer) else self._vit_block
        if self.is_compiled:
            for argument in arguments:
                if argument is not None:
                    torch._dynamo.maybe_mark_dynamic(argument, 0)  # the batch size
        if torch.is_grad_enabled() and self._block_index[block] < self.recomputed_blocks:
            return checkpoint(forward, block, *arguments, use_reentrant=False, preserve_rng_state=False)
        return forward(block, *arguments)

    def recompute_everything(self) -> bool:
        """Recompute the activations of all blocks from now on. Returns False if that was so already."""
        recomputed_before = self.recomputed_blocks
        self.recomputed_blocks = self.num_blocks
        return recomputed_before < self.num_blocks

    def action_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the action tokens 31744..31999 alone: hidden (B, A, D) -> (B, A, 256) float32."""
        if self.l1_head is not None:
            return laplace_logits(self.l1_head(hidden).flatten(1))
        head = self.language_model.lm_head
        if isinstance(head, LoraLinear):
            return head.rows(hidden, ACTION_ROWS)
        return F.linear(hidden, head.weight[ACTION_ROWS]).float()
