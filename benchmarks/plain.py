"""The 7B network as transformers, timm and peft run it: what our own passes are compared with.

Same weights, same arithmetic; adapters by peft (float32, added in float32), HF's decoder layers, every ViT block by
timm's own forward, all 32,064 rows of the head. Eager.
"""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vla.lora import lora_targets
from vla.model import ACTION_ROWS, OpenVLAOFT


def make_plain(network: OpenVLAOFT, rank: int = 16) -> nn.Module:
    """Put peft's adapters on a freshly loaded network, and let it run by the libraries' own forward passes."""
    targets = lora_targets(network)
    network.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=targets)
    inject_adapter_in_model(config, network)
    for name, parameter in network.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    for layer in network.language_model.model.layers:
        layer.self_attn.is_causal = False
    if network.proprio_projector is not None:
        network.proprio_projector.requires_grad_(True)
    return network.eval()


def plain_logits(network: OpenVLAOFT, inputs: tuple[Tensor | None, ...], checkpointing: bool) -> Tensor:
    """The action logits (B, A, 256) of `network`, which `make_plain` has prepared."""
    pixels, ids, lengths, proprio = inputs
    images = pixels.to(network.dtype).unflatten(1, (-1, 6)).flatten(0, 1)
    backbone = network.vision_backbone
    features = []
    for vit, channels in ((backbone.featurizer, slice(0, 3)), (backbone.fused_featurizer, slice(3, 6))):
        vit.set_grad_checkpointing(checkpointing)
        (tokens,) = vit.forward_intermediates(
            images[:, channels], indices=[len(vit.blocks) - 2], norm=False, output_fmt="NLC", intermediates_only=True
        )
        features.append(tokens)
    projected = network.projector(torch.cat(features, -1).unflatten(0, (len(ids), -1)).flatten(1, 2))
    proprio_token = network.proprio_projector(proprio)[:, None].to(network.dtype)
    text, _ = network._embed_text(ids, lengths)
    hidden = torch.cat([text[:, :1], projected, proprio_token, text[:, 1:]], dim=1)
    first_output = network.first_output_position(hidden, ids, lengths)

    llama = network.language_model.model
    rope = llama.rotary_emb(hidden, position_ids=torch.arange(hidden.shape[1], device=hidden.device)[None])
    for layer in llama.layers:
        if checkpointing and torch.is_grad_enabled():
            hidden = checkpoint(layer, hidden, None, position_embeddings=rope, use_reentrant=False)
        else:
            hidden = layer(hidden, None, position_embeddings=rope)
    positions = first_output[:, None] + torch.arange(network.num_action_tokens, device=hidden.device)
    hidden = llama.norm(hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1])))
    return network.language_model.lm_head(hidden)[..., ACTION_ROWS].float()
