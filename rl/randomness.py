"""Randomness as a function of (seed, what it is for), never of history: a resumed run needs no replay."""

import zlib

import numpy as np
import torch


def numpy_generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """An independent numpy generator for each (seed, purpose, counters)."""
    return np.random.default_rng(_sequence(seed, purpose, counters))


def torch_generator(seed: int, purpose: str, *counters: int) -> torch.Generator:
    """An independent torch CPU generator for each (seed, purpose, counters)."""
    entropy = int(_sequence(seed, purpose, counters).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(entropy & (2**63 - 1))


def _sequence(seed: int, purpose: str, counters: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *counters))
