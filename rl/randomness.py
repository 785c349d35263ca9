"""Random streams that depend only on (seed, purpose, counters), never on what was drawn before.

So a resumed run draws what it would have drawn without the stop, and the order in which simulators answer does not
matter.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch

from rl.trajectory import Episode


def seed_sequence(seed: int, purpose: str, *counters: int) -> np.random.SeedSequence:
    """The seed of an independent numpy stream for each (seed, purpose, counters)."""
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *counters))


def torch_generator(seed: int, purpose: str, *counters: int) -> torch.Generator:
    """An independent torch CPU generator for each (seed, purpose, counters)."""
    state = seed_sequence(seed, purpose, *counters).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) & (2**63 - 1))


@dataclass(frozen=True)
class Randomness:
    """The random stream of a rollout: decision t of an episode draws from (seed, purpose, update, episode, t)."""

    seed: int
    purpose: str
    update_index: int = 0

    def generator(self, episode: Episode, decision_index: int) -> torch.Generator:
        """The CPU generator of one decision."""
        return torch_generator(self.seed, self.purpose, self.update_index, episode.index, decision_index)
