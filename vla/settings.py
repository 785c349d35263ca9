"""The settings of the command lines in `vla`; the field docstrings are the text of `--help`. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from errors import BadInput


@dataclass(frozen=True)
class TinySize:
    """Sizes of the network. The default decides on two images in some 30 ms on one core."""

    image_size: int = 120
    """Side of the model's images in pixels."""
    patch_size: int = 20
    """Side of a patch in pixels: (image_size / patch_size)^2 tokens per image."""
    vision_dim: int = 96
    """Width of both vision transformers in numbers per token; a multiple of vision_heads."""
    vision_depth: int = 4
    """Blocks of both vision transformers; the last one is never computed, as in the 7B model."""
    vision_heads: int = 4
    """Attention heads of both vision transformers."""
    llm_dim: int = 128
    """Width of the language model in numbers per token. Its two vocabulary matrices have 32,064 rows of this width."""
    llm_depth: int = 4
    """Blocks of the language model; with one, action positions could not be told apart."""
    llm_heads: int = 4
    """Attention heads of the language model."""
    llm_mlp_dim: int = 344
    """Width of the language model's MLPs in numbers per token."""


@dataclass(frozen=True)
class TinyArgs:
    """Make a small checkpoint with random weights in the real folder format."""

    out: Path
    """Folder to write."""
    seed: int = 0
    """Seed of the random weights."""
    num_images: Literal[1, 2] = 2
    """Images per decision: 1 (agentview) or 2 (and wrist)."""
    proprio: bool = True
    """Give the robot's state to the model."""
    l1_head: bool = False
    """Add an L1 regression head, as checkpoints of the kind "L1 regression" have."""
    size: TinySize = field(default_factory=TinySize)


@dataclass(frozen=True)
class LearnerSettings:
    """The optimizer and what it learns from."""

    steps: int = 6000
    """Optimizer steps."""
    batch_size: int = 256
    """Frames per optimizer step."""
    lr: float = 1.5e-3
    """Largest learning rate, per optimizer step: after the warm-up. From there on, a cosine."""
    warmup_steps: int = 200
    """Optimizer steps of the warm-up."""
    weight_decay: float = 0.02
    """Weight decay of AdamW: the share, times the learning rate, that a matrix loses per optimizer step."""
    max_grad_norm: float = 1.0
    """L2 norm of the gradient above which it is scaled down."""
    soft_target_bins: float = 0.0
    """Standard deviation in bins of Gaussian targets, for all dimensions but the gripper; 0: one-hot."""
    aux_weight: float = 0.0
    """Weight of regressing the objects' positions, in metres, from the proprio token; 0: off."""
    proprio_noise: float = 0.02
    """Noise on the robot's state, as a share of its standard deviation."""
    augment: bool = True
    """Crop and colour training images at random, as OpenVLA-OFT does."""
    seed: int = 0
    """Seed of the random weights, the held-out episodes, the batches and the augmentation."""

    def check(self) -> None:
        """Raises BadInput that names the flag."""
        for name, least in (("steps", 1), ("batch_size", 1), ("warmup_steps", 0)):
            if getattr(self, name) < least:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: expected {least} or more")
        for name in ("lr", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: expected a number above 0")
        for name in ("weight_decay", "soft_target_bins", "aux_weight", "proprio_noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: expected 0 or more")


@dataclass(frozen=True)
class SftArgs:
    """Fine-tune an OpenVLA-OFT policy on demonstrations. All parameters are trained; meant for small policies."""

    demos: tuple[Path, ...]
    """Folders of demonstrations (episode_*.npz)."""
    out: Path
    """Folder to write; must not exist."""
    init: str | None = None
    """Checkpoint to start from, folder or hub id (None: random weights in the sizes below)."""
    size: TinySize = field(default_factory=TinySize)
    num_images: Literal[1, 2] | None = None
    """Images per decision: 1 (agentview) or 2 (and wrist). None: what --init has, or 2."""
    task_suite: str = "libero_spatial"
    """Suite that the statistics are named after."""
    holdout: float = 0.05
    """Share of the episodes that is kept from training, to be measured on."""
    learner: tyro.conf.OmitArgPrefixes[LearnerSettings] = field(default_factory=LearnerSettings)
    save_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the stored weights; training is in float32 (bfloat16 autocast on a GPU)."""
    checkpoint_at: tuple[int, ...] = ()
    """Optimizer steps after which to save a checkpoint as well, as OUT/step_000500."""
    log_every: int = 100
    """Optimizer steps per log line."""
    eval_every: int = 500
    """Optimizer steps between measurements on the held-out episodes; a multiple of --log-every."""
    max_minutes: float | None = None
    """Minutes of training after which to stop and save (None: no limit)."""
    device: str = "auto"
    """Device to train on: cpu, cuda, cuda:1 and so on (auto: a GPU if there is one)."""
    workers: int = 4
    """Threads that decode images."""


@dataclass(frozen=True)
class CardArgs:
    """Write the README.md of a fine-tuned policy: what it is, how it was made, and the hashes of its files."""

    checkpoint: Path
    """A folder that vla.sft wrote."""
    evaluation: Path | None = None
    """Text file in Markdown with the results to show (None: no results)."""
