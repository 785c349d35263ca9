"""How to load a policy, and how it can act. Command lines read this file, so it does not import torch."""

from dataclasses import dataclass
from typing import Literal

FrozenWeights = Literal["auto", "float32", "bf16", "int8"]
Compile = Literal["auto", "on", "off"]
L1Student = Literal["laplace", "tokens"]
# How the policy turns its output into actions, see `Policy.act`
Mode = Literal["greedy", "median", "sample", "l1"]


@dataclass(frozen=True)
class LoadOptions:
    """How to load a policy: whose statistics scale its actions, which new adapters it gets, and how it runs."""

    # The checkpoint's statistics that scale actions and proprio: those of this suite, unless `unnorm_key` names others.
    # None: a suite of LIBERO, that of the only statistics
    task_suite: str | None
    unnorm_key: str | None = None
    # A folder with the statistics of demonstrations that the policy will learn from; None: the checkpoint's own
    statistics: str | None = None
    # Images per decision; None: as the checkpoint says, or as is usual for its kind
    num_images: int | None = None
    # Of new adapters; a trained adapter keeps its own rank and alpha. lora_alpha None: the same as the rank (scale 1)
    lora_rank: int = 16
    lora_alpha: int | None = None
    # Adapters only in the token head and so many blocks at the language model's end, above a frozen trunk; None: in all
    # parts. A trained adapter keeps its own number, too.
    trained_blocks: int | None = None
    # Beside an L1 head: draw tokens from a Laplace distribution around the L1 head's actions, or by the token head, as
    # without an L1 head. A trained adapter keeps its own way.
    l1_student: L1Student = "laplace"
    seed: int = 0
    # See `choose_device`
    device: str = "auto"
    # See `limit_memory`
    memory_budget: float | None = None
    # auto: int8 if a trained adapter was trained on it; else bf16 on a GPU and float32 on a CPU
    frozen_weights: FrozenWeights = "auto"
    # "on": torch.compile, and CUDA graphs on a GPU; "auto": on a GPU CUDA graphs, and torch.compile for large networks
    compile: Compile = "auto"
