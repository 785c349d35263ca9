"""Small checkpoints for tests, in the real folder format, and policies of them."""

from pathlib import Path

import torch

from vla.loading import LoadOptions
from vla.policy import Policy
from workshop.tiny import TinySize, make_tiny_checkpoint

SUITE = "libero_spatial"
BUNDLED = Path(__file__).resolve().parent.parent / "checkpoints" / "tiny-libero-spatial"
SMALL = TinySize(
    image_size=32,
    patch_size=16,
    vision_dim=16,
    vision_depth=3,
    vision_heads=2,
    llm_dim=16,
    llm_depth=3,
    llm_heads=2,
    llm_mlp_dim=24,
)


def make_small_checkpoint(folder: Path, **options) -> Path:
    """`workshop.tiny`'s checkpoint in its smallest useful size: 4 patches per image, 3 layers of width 16."""
    return make_tiny_checkpoint(folder, size=SMALL, **options)


def load_policy(folder: Path, **options) -> Policy:
    """A policy on the CPU, with adapters of rank 4 unless the options say otherwise."""
    defaults = {"task_suite": SUITE, "device": "cpu", "lora_rank": 4}
    return Policy.load(str(folder), LoadOptions(**(defaults | options)))


@torch.no_grad()
def train_a_little(policy: Policy, step: float = 0.05) -> None:
    """Move all trainable parameters at random, the same way every time."""
    generator = torch.Generator().manual_seed(1)
    for _, parameter in policy.named_trainable_parameters():
        parameter += step * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def move_adapters(policy: Policy, step: float) -> None:
    """Move every number of every B by `step` in a random direction, the same way every time."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_trainable_parameters():
        if name.endswith("lora_B"):
            parameter += step * torch.randn(parameter.shape, generator=generator).sign()
