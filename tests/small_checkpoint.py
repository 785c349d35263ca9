"""Small checkpoints for tests, in the real folder format."""

from pathlib import Path

from workshop.tiny import TinySize, make_tiny_checkpoint

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
