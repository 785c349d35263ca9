"""The vision backbone of OpenVLA: DINOv2 and SigLIP, two vision transformers of timm.

Source: openvla-oft @213c5ff, prismatic/extern/hf/modeling_prismatic.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from vla.network_config import NetworkConfig

# timm would import wandb, which takes seconds, for a summary that is not used here. None stands for a missing module.
sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
import timm  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

if sys.modules["wandb"] is None:
    del sys.modules["wandb"]


def vit_block(block: nn.Module, tokens: Tensor) -> Tensor:
    """Run a block of a vision transformer: (B, T, D) -> (B, T, D). It is a function, so that it can be compiled."""
    return block(tokens)


class FusedVisionBackbone(nn.Module):
    """Two vision transformers, DINOv2 and SigLIP, side by side on the same images.

    Their last blocks, final norms and pooling are never computed. They exist because checkpoints hold their weights.
    """

    def __init__(self, config: NetworkConfig):
        super().__init__()
        self.featurizer = _create_vit(config, 0)
        self.fused_featurizer = _create_vit(config, 1)
        # `vla.cuda_graphs` sets it. Then SigLIP runs on it at the same time as DINOv2, because few images do not use a
        # large GPU fully.
        self.second_stream: torch.cuda.Stream | None = None
        self.computed_blocks = [*self.featurizer.blocks[:-1], *self.fused_featurizer.blocks[:-1]]

    def forward(self, pixel_values: Tensor, run_block: Callable[..., Tensor]) -> Tensor:
        """Image features: pixel_values (B, 6 * images, S, S) -> (B, images * patches, dino_dim + siglip_dim).

        Each image has 3 channels normalised for DINOv2, then 3 normalised for SigLIP. run_block: OpenVLAOFT.run_block.
        """
        images = pixel_values.unflatten(1, (-1, 6)).flatten(0, 1)  # (B * images, 6, S, S)
        dino, siglip = side_by_side(
            partial(_patch_features, self.featurizer, images[:, :3], run_block),
            partial(_patch_features, self.fused_featurizer, images[:, 3:], run_block),
            None if torch.is_grad_enabled() else self.second_stream,
        )
        return torch.cat([dino, siglip], dim=-1).unflatten(0, (len(pixel_values), -1)).flatten(1, 2)


def _create_vit(config: NetworkConfig, index: int) -> VisionTransformer:
    """Create the first or the second vision transformer, without classifier and without pretrained weights."""
    options: dict[str, object] = {"img_size": config.image_sizes[index], **config.test_vit_overrides[index]}
    options["act_layer"] = config.timm_override_act_layers[index]  # timm ignores None
    if torch.get_default_device().type == "meta":
        options["weight_init"] = "skip"  # meta tensors have no values to initialise
    # num_classes=0 drops the classifier and keeps SigLIP's attention pooling, whose weights are in every checkpoint.
    return timm.create_model(config.timm_model_ids[index], pretrained=False, num_classes=0, **options)


def _patch_features(vit: VisionTransformer, images: Tensor, run_block: Callable[..., Tensor]) -> Tensor:
    """Output of the second-to-last block, without final norm, class and register tokens: (B, patches, dim)."""
    tokens = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
    for block in vit.blocks[:-1]:
        tokens = run_block(block, tokens)
    return tokens[:, vit.num_prefix_tokens :]


def side_by_side(
    first: Callable[[], Tensor], second: Callable[[], Tensor], stream: torch.cuda.Stream | None
) -> tuple[Tensor, Tensor]:
    """The results of two functions. With `stream`, the GPU computes the second on it, at the same time as the first.

    Neither function may free a tensor that the other reads. Memory that the second frees is used again only by later
    work on `stream`, which first waits for the current stream.
    """
    if stream is None:
        return first(), second()
    current_stream = torch.cuda.current_stream()
    stream.wait_stream(current_stream)
    try:
        with torch.cuda.stream(stream):
            second_result = second()
        first_result = first()
    finally:  # a CUDA graph cannot end, not even where memory ran out, before its streams have joined
        current_stream.wait_stream(stream)
    return first_result, second_result
