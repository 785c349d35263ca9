"""OpenVLA-OFT: two vision transformers, a projector and a Llama that decodes a whole action chunk in one pass.

The language model's input is, for a prompt of P ids (BOS first, 29871 last) and N image and proprio tokens,

    [BOS] [N image and proprio tokens] [prompt 1 .. P-1] [A zero vectors] [</s>]

with full attention between all of them. The logits of action token i are read one position BEFORE the i-th zero vector,
because training kept the next-token shift. So those of the first are read at the last prompt token. Outputs that nobody
reads are not computed: the last block of each vision transformer is skipped, and Llama's last block runs only at the A
positions that are read.

Attribute names are those of the reference model, so that checkpoint keys and LoRA targets agree. Source: openvla-oft
@213c5ff, prismatic/extern/hf/modeling_prismatic.py; stock timm and transformers, no remote code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from vla.adapters import AdaptedLayers
from vla.lora import LoraLinear
from vla.network_config import NetworkConfig
from vla.tokens import ACTION_TOKEN_IDS, EOS_ID, PAD_ID
from vla.vision import FusedVisionBackbone, vit_block

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
    qkv = _linear_maps(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), normed)
    q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in qkv)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    if positions is not None:
        hidden = hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
        q = q.gather(2, positions[:, None, :, None].expand(-1, q.shape[1], -1, head_dim))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != q.shape[1])
    hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    normed = block.post_attention_layernorm(hidden)
    gate, up = _linear_maps(mlp, "gate_up_proj", ("gate_proj", "up_proj"), normed)
    return hidden + mlp.down_proj(mlp.act_fn(gate) * up)


def _linear_maps(module: nn.Module, fused_name: str, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
    """The outputs of several linear maps of x. If `vla.adapters` has joined them in layer `fused_name`, use that."""
    if hasattr(module, fused_name):
        layer = getattr(module, fused_name)
        return layer(x).split(layer.out_features, dim=-1)
    return tuple(getattr(module, name)(x) for name in names)


class Projector(nn.Module):
    """Turns image features into tokens of the language model: (B, patches, vision_dim) -> (B, patches, llm_dim)."""

    def __init__(self, vision_dim: int, llm_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, llm_dim)
        self.fc3 = nn.Linear(llm_dim, llm_dim)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(features)))))


class ProprioProjector(nn.Module):
    """Turns the robot's state into one token of the language model.

    Checkpoints hold its state dict in a `.pt` file of its own.
    """

    def __init__(self, proprio_dim: int, llm_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, llm_dim)
        self.fc2 = nn.Linear(llm_dim, llm_dim)
        self.proprio_dim = proprio_dim

    def forward(self, proprio: Tensor) -> Tensor:
        """Normalised proprio (B, proprio_dim) -> token (B, llm_dim)."""
        return self.fc2(F.gelu(self.fc1(proprio)))

    @staticmethod
    def sizes(state: dict[str, Tensor]) -> tuple[int, int]:
        """The arguments of the constructor, from a state dict."""
        llm_dim, proprio_dim = state["fc1.weight"].shape
        return proprio_dim, llm_dim


class ResidualBlock(nn.Module):
    """A layer of the L1 head."""

    def __init__(self, dim: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return x + self.ffn(x)


class ResidualMLP(nn.Module):
    """All layers of the L1 head: (..., input_dim) -> (..., output_dim)."""

    def __init__(self, num_blocks: int, input_dim: int, hidden_dim: int, output_dim: int):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_dim)
        self.fc1 = nn.Linear(input_dim, hidden_dim)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(hidden_dim) for _ in range(num_blocks))
        self.layer_norm2 = nn.LayerNorm(hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1RegressionHead(nn.Module):
    """Predicts continuous normalised actions from the hidden states at the action positions.

    Checkpoints hold its state dict in a `.pt` file of its own.
    """

    def __init__(self, num_blocks: int, llm_dim: int, hidden_dim: int, action_dim: int):
        super().__init__()
        # The input for one action is the concatenated hidden states of its `action_dim` tokens.
        self.model = ResidualMLP(num_blocks, llm_dim * action_dim, hidden_dim, action_dim)
        self.action_dim = action_dim

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (B, A, llm_dim) after the final norm -> (B, chunk_length, action_dim), not clipped to [-1, 1]."""
        batch, num_tokens, llm_dim = hidden.shape
        return self.model(hidden.reshape(batch, num_tokens // self.action_dim, self.action_dim * llm_dim))

    @staticmethod
    def sizes(state: dict[str, Tensor]) -> tuple[int, int, int, int]:
        """The arguments of the constructor, from a state dict."""
        hidden_dim, input_dim = state["model.fc1.weight"].shape
        action_dim = state["model.fc2.weight"].shape[0]
        num_blocks = len({key.split(".")[2] for key in state if key.startswith("model.mlp_resnet_blocks.")})
        return num_blocks, input_dim // action_dim, hidden_dim, action_dim


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
        blocks = [*self.vision_backbone.computed_blocks, *self.language_model.model.layers]
        self._block_index = {block: index for index, block in enumerate(blocks)}  # places in the forward pass
        self.num_blocks = len(blocks)
        # How many blocks recompute their activations in the backward pass instead of keeping them. These are the first
        # ones in the order of the forward pass, so those of the vision transformers come first: they save more memory
        # for the time that recomputing takes.
        self.recomputed_blocks = 0
        # The functions that run a block, or their compiled versions
        self._vit_block: Callable[..., Tensor] = vit_block
        self._llama_block: Callable[..., Tensor] = llama_block

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.model.embed_tokens.weight.dtype

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_blocks` was called."""
        return self._llama_block is not llama_block

    def compile_blocks(self) -> None:
        """Compile the blocks with torch.compile, which fuses their small operations."""
        # torch makes separate code for student and teacher, with and without gradient, and for each prompt length. One
        # code serves all batch sizes from 2 on (see `run_block`). A batch of 1 gets its own.
        torch._dynamo.config.recompile_limit = 64
        # Recompute cheap element-wise products in the backward pass: a quarter less memory for little time.
        torch._functorch.config.activation_memory_budget = 0.8
        # Also keep on the disk what torch has derived from `vla.lora`'s autograd functions. Their code is part of the
        # key by which it is found again. (Older versions of torch do not have this.)
        if hasattr(torch._functorch.config, "autograd_cache_allow_custom_autograd_functions"):
            torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
        self._vit_block = torch.compile(vit_block)
        self._llama_block = torch.compile(llama_block)

    def forward(
        self, pixel_values: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor | None, proprio: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Logits of the action tokens 31744..31999, (B, A, 256) float32, and the hidden states (B, A, D) behind them.

        pixel_values (B, 6 * images, S, S); prompt_ids (B, P), padded on the right; prompt_lengths (B,), None if no
        prompt is padded; proprio (B, proprio_dim) normalised, None without a proprio projector.
        """
        embeddings, is_real = self.embed(pixel_values, prompt_ids, prompt_lengths, proprio)
        first_output = self.first_output_position(embeddings, prompt_ids, prompt_lengths)
        hidden = self.run_language_model(embeddings, is_real, first_output)
        return self.action_logits(hidden), hidden

    def embed(
        self, pixel_values: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor | None, proprio: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The language model's input (B, S, D), and a mask (B, S) that is True where it is not padding.

        The mask is None if no prompt is padded.

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
        offset = torch.arange(ids.shape[1], device=ids.device) - _lengths(prompt_ids, prompt_lengths)[:, None]
        text = self.language_model.model.embed_tokens(ids.masked_fill(offset == num_actions, EOS_ID))
        text = text.masked_fill(((offset >= 0) & (offset < num_actions))[..., None], 0.0)
        embeddings = torch.cat([text[:, :1], *parts, text[:, 1:]], dim=1)
        if prompt_lengths is None:
            return embeddings, None
        return embeddings, F.pad(offset <= num_actions, (embeddings.shape[1] - text.shape[1], 0), value=True)

    def first_output_position(
        self, embeddings: Tensor, prompt_ids: Tensor, prompt_lengths: Tensor | None
    ) -> Tensor:
        """The position in the input, (B,) int64, whose output gives the first action token: the last prompt token's."""
        num_inserted = embeddings.shape[1] - (prompt_ids.shape[1] + self.num_action_tokens + 1)
        return num_inserted + _lengths(prompt_ids, prompt_lengths) - 1

    def run_language_model(self, embeddings: Tensor, is_real: Tensor | None, first_output: Tensor) -> Tensor:
        """Returns hidden states (B, A, D) after the final norm, at A positions.

        embeddings (B, S, D) and is_real (B, S) as `embed` returns them. first_output (B,) int64: the first of the A
        positions of each row.
        """
        llama = self.language_model.model
        # Padding comes last, so the positions of all other tokens are those of the unpadded sequence.
        position_ids = torch.arange(embeddings.shape[1], device=embeddings.device)[None]
        cos, sin = llama.rotary_emb(embeddings, position_ids=position_ids)
        # Without padding there is no mask, so that SDPA uses its fastest kernel, as the reference does.
        mask = None if is_real is None else is_real[:, None, None, :]
        output_positions = first_output[:, None] + torch.arange(
            self.num_action_tokens, device=embeddings.device
        )
        hidden = embeddings
        for layer in llama.layers:
            # The output of the last layer is read at these positions only.
            positions = output_positions if layer is llama.layers[-1] else None
            hidden = self.run_block(layer, hidden, mask, cos, sin, positions)
        return llama.norm(hidden)

    def run_block(self, block: nn.Module, *arguments: Tensor | None) -> Tensor:
        """Run a block with the arguments of `llama_block` or `vit_block`, and keep or recompute its activations."""
        forward = self._llama_block if isinstance(block, LlamaDecoderLayer) else self._vit_block
        if self.is_compiled:
            for argument in arguments:
                if argument is not None:
                    torch._dynamo.maybe_mark_dynamic(argument, 0)  # the batch size
        if self._block_index[block] < self.recomputed_blocks and torch.is_grad_enabled():
            return checkpoint(forward, block, *arguments, use_reentrant=False, preserve_rng_state=False)
        return forward(block, *arguments)

    def recompute_everything(self) -> bool:
        """Recompute the activations of all blocks from now on. Returns False if that was so already."""
        recomputed_before = self.recomputed_blocks
        self.recomputed_blocks = self.num_blocks
        return recomputed_before < self.num_blocks

    def action_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the action tokens 31744..31999 alone: hidden (B, A, D) -> (B, A, 256) float32."""
        head = self.language_model.lm_head
        if isinstance(head, LoraLinear):
            return head.rows(hidden, ACTION_ROWS)
        return F.linear(hidden, head.weight[ACTION_ROWS]).float()


def _lengths(prompt_ids: Tensor, prompt_lengths: Tensor | None) -> Tensor:
    """The length of each prompt, (B,); all are P where `prompt_lengths` is None."""
    if prompt_lengths is not None:
        return prompt_lengths
    return prompt_ids.new_full(prompt_ids.shape[:1], prompt_ids.shape[1])
