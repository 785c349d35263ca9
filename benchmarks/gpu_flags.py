"""The flags of `benchmarks.gpu`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Args:
    folder: Path | None = None
    """Where the checkpoint is, or is written with random weights, two images and robot state (None: in a temporary
    folder)."""
    frozen_weights: tuple[Literal["float32", "bf16", "int8", "fp8"], ...] = ("bf16",)
    """Formats of the frozen weights that are measured, one after the other."""
    memory_gib: float = 24.0
    """Limit of the GPU allocator, in GiB."""
    repeats: int = 8
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Observations decided together."""
    micro_batches: tuple[int, ...] = (2, 4)
    """Samples of an update's micro-batch. A compiled network computes one sample as two, so 1 shows the time of 2."""
    budgets_gib: tuple[float, ...] = ()
    """Values of --memory-budget for which a run's plan, rate and peak memory are shown, too (16 24 48 80)."""
    agreement: bool = False
    """Also compare compiled passes with plain ones in float32, which take 30 GB."""
    iteration: bool = True
    """Measure a whole iteration with simulators (`benchmarks.data_parallel`)."""
