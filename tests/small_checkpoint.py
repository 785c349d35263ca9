"""Small checkpoints for tests, in the real folder format, and policies of them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contracts import Observation
from vla.checkpoint import inspect_checkpoint
from vla.load_options import LoadOptions
from vla.model import OpenVLAOFT
from vla.network_io import load_network
from vla.policy import Policy
from workshop.sft_config import TinySize
from workshop.tiny import make_tiny_checkpoint

SUITE = "libero_spatial"
# Load options of every kind of policy that the small checkpoint can be.
KINDS: dict[str, dict[str, object]] = {
    "all": {},
    "last_block": {"trained_blocks": 1},
    "last_2_blocks": {"trained_blocks": 2},
    "language_model": {"trained_blocks": 3},
    "int8": {"trained_blocks": 2, "frozen_weights": "int8"},
    "laplace": {"l1_student": "laplace"},
    "laplace_last_2_blocks": {"l1_student": "laplace", "trained_blocks": 2},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
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

# The sizes of a small network and of one that it can be grown into (benchmarks/growing.py).
GROWABLE = TinySize(
    56, 14, vision_dim=32, vision_depth=3, vision_heads=2, llm_dim=32, llm_depth=3, llm_heads=1
)
GROWN = TinySize(
    56,
    14,
    vision_dim=64,
    vision_depth=5,
    vision_heads=2,
    llm_dim=128,
    llm_depth=6,
    llm_heads=4,
    llm_mlp_dim=500,
)


def make_small_checkpoint(folder: Path, **options) -> Path:
    """`workshop.tiny`'s checkpoint in its smallest useful size: 4 patches per image, 3 layers of width 16."""
    return make_tiny_checkpoint(folder, size=SMALL, **options)


def load_small_network(folder: Path, dtype: torch.dtype = torch.float32) -> OpenVLAOFT:
    """The network without adapters, on the CPU."""
    return load_network(inspect_checkpoint(folder), 56, torch.device("cpu"), dtype)


def network_inputs() -> tuple[Tensor, Tensor, None, None]:
    """Two random observations of one image, without padding and proprio, as a small network reads them."""
    generator = torch.Generator().manual_seed(5)
    pixel_values = torch.randn(2, 6, 32, 32, generator=generator)
    prompt_ids = torch.randint(3, 100, (2, 9), generator=generator)
    return pixel_values, prompt_ids, None, None


def load_policy(folder: Path, **options) -> Policy:
    """A policy on the CPU, with adapters of rank 4 and tokens of the token head unless the options say otherwise."""
    defaults = {"task_suite": SUITE, "device": "cpu", "lora_rank": 4, "l1_student": "tokens"}
    return Policy.load(str(folder), LoadOptions(**(defaults | options)))


def trained_policy(folder: Path, **options) -> Policy:
    policy = load_policy(folder, **options)
    train_a_little(policy)
    return policy


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


def train_a_little(policy: Policy, step: float = 0.05) -> None:
    """Move all trainable parameters at random, the same way every time."""
    train_network_a_little(policy.network, step)


@torch.no_grad()
def train_network_a_little(network: OpenVLAOFT, step: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter += step * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    network.adapters.refresh()


@torch.no_grad()
def move_adapters(policy: Policy, step: float) -> None:
    """Move every number of every B by `step` in a random direction, the same way every time."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_trainable_parameters():
        if name.endswith("lora_B"):
            parameter += step * torch.randn(parameter.shape, generator=generator).sign()


@torch.no_grad()
def change_by_a_step(policy: Policy, observations: Sequence[Observation], step: float) -> Tensor:
    """How the logits change when the adapters move by `step`: half the difference to the opposite step, flattened.

    The adapters must not have been trained. They stay at the opposite step.
    """
    move_adapters(policy, step)
    after_step = policy.chunk_logits(observations)
    move_adapters(policy, -2 * step)
    after_opposite_step = policy.chunk_logits(observations)
    return (after_step - after_opposite_step).flatten() / 2
