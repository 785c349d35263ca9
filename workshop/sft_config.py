"""The settings of supervised fine-tuning: the flags of workshop.sft."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configs.bounds import NOT_NEGATIVE, POSITIVE, SHARE, PositiveInt, check_fields
from contracts import BadInput

Flip = Literal["none", "both", "horizontal", "vertical"]
NETWORK_LR = 1.5e-3  # the default for all parameters of a small network
ADAPTER_LR = 5e-4  # the default for adapters: openvla-oft's
FINAL_LR = 0.01  # share of the largest learning rate at which the cosine ends


@dataclass(frozen=True)
class TinySize:
    """Sizes of the network. With the default a decision on two images takes about 30 ms on one core."""

    # Side of the model's images in pixels.
    image_size: PositiveInt = 120
    # Side of a patch in pixels: (image_size / patch_size)^2 tokens per image.
    patch_size: PositiveInt = 20
    # Width of both vision transformers in numbers per token; a multiple of vision_heads.
    vision_dim: PositiveInt = 96
    # Blocks of both vision transformers; the last one is never computed, as in the 7B model.
    vision_depth: Annotated[int, Field(gt=1)] = 4
    # Attention heads of both vision transformers.
    vision_heads: PositiveInt = 4
    # Width of the language model in numbers per token. Its two vocabulary matrices have 32,064 rows of this width.
    llm_dim: PositiveInt = 128
    # Blocks of the language model; with one, action positions could not be told apart.
    llm_depth: Annotated[int, Field(gt=1)] = 4
    # Attention heads of the language model.
    llm_heads: PositiveInt = 4
    # Width of the language model's MLPs in numbers per token.
    llm_mlp_dim: PositiveInt = 344

    def __post_init__(self) -> None:
        check_fields(self)
        # Rotary embeddings turn pairs of numbers, so the width of a language head is even.
        divisors = (
            ("--image-size", self.image_size, "--patch-size", self.patch_size),
            ("--vision-dim", self.vision_dim, "--vision-heads", self.vision_heads),
            ("--llm-dim", self.llm_dim, "twice --llm-heads", 2 * self.llm_heads),
        )
        for flag, size, divisor_name, divisor in divisors:
            if size % divisor != 0:
                raise BadInput(f"{flag} {size} must be a multiple of {divisor_name}, which is {divisor}")


@dataclass(frozen=True)
class SftArgs:
    """Fine-tune an OpenVLA-OFT policy on demonstrations: all parameters of a small one, or adapters."""

    # Folders of demonstrations (workshop.demos), of LeRobot datasets or of RLDS data.
    demos: tuple[str, ...]
    # Folder to write; must not exist.
    out: Path
    # Checkpoint to start from, folder or hub id (None: random weights in the sizes below).
    init: str | None = None
    # Rank of adapters to train in place of all parameters: what a 7B needs. openvla-oft's is 32.
    lora_rank: Annotated[int | None, POSITIVE] = None
    # GiB of GPU memory that training may take (None: all that is free). A 7B was trained by adapters with 40. A budget
    # up to 10 % above what the GPU reports means all of the GPU.
    memory_budget: Annotated[float | None, POSITIVE] = None
    # Sizes of a network of random weights.
    size: TinySize = field(default_factory=TinySize)
    # Images per decision: 1 (agentview) or 2 (and wrist). None: what --init has; for random weights 2.
    num_images: Literal[1, 2] | None = None
    # Whether random weights read the robot's state, too. The public checkpoints with a token head do not.
    proprio: bool = True
    # Train an L1 head (by L1 regression) and leave the token head untrained, as in the public L1 checkpoints.
    l1: bool = False
    # How pictures of LeRobot and RLDS data must be mirrored to be upright as openvla's are. both: LIBERO's own.
    flip: Flip = "none"
    # Suite that the statistics are named after (None: the one that workshop.demos has played, or the name of the
    # LeRobot or RLDS dataset).
    task_suite: str | None = None
    # Share of the episodes that is kept from training, to be measured on.
    holdout: Annotated[float, SHARE] = 0.05
    # Optimizer steps.
    steps: Annotated[int, POSITIVE] = 6000
    # Frames per optimizer step.
    batch_size: Annotated[int, POSITIVE] = 256
    # Largest learning rate, after the warm-up; from there on, a cosine (None: 1.5e-3, of adapters 5e-4).
    lr: Annotated[float | None, POSITIVE] = None
    # Optimizer steps of the warm-up.
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 200
    # Crop and colour training images at random, as OpenVLA-OFT does.
    augment: bool = True
    # Seed of the random weights, the held-out episodes, the batches and the augmentation.
    seed: Annotated[int, NOT_NEGATIVE] = 0
    # Optimizer steps per log line, with a measurement on the held-out episodes.
    log_every: Annotated[int, POSITIVE] = 100
    # Device to train on: cpu, cuda, cuda:1 and so on (auto: a GPU if there is one).
    device: str = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        has_sizes = self.size != TinySize() or not self.proprio
        if self.init is not None and has_sizes:
            raise BadInput(
                "--image-size ... --llm-mlp-dim and --no-proprio are for random weights: leave them out, or --init"
            )
        if self.lora_rank is not None and (self.init is None or self.num_images is not None or self.l1):
            raise BadInput(
                "--lora-rank puts adapters on a policy: give it by --init, and leave out --num-images and --l1"
            )

    def learning_rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: a linear warm-up, then half a cosine down to one hundredth."""
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        progress = max(0.0, step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        default_lr = NETWORK_LR if self.lora_rank is None else ADAPTER_LR
        largest_lr = default_lr if self.lr is None else self.lr
        return largest_lr * warmup * (FINAL_LR + (1 - FINAL_LR) * cosine)
