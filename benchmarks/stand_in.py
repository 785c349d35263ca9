"""Stand in for a policy on a GPU: random actions after a pause, in which the CPU cores are free for simulators."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from contracts import Observation
from vla.policy import Acted
from vla.tokens import FIRST_ACTION_TOKEN, NUM_BINS

CHUNK_LENGTH = 8
ACTION_DIM = 7


class StandInPolicy:
    """A policy that sleeps `latency_s` in every call and returns uniformly random tokens."""

    device = torch.device("cpu")

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    def act(
        self,
        observations: Sequence[Observation],
        mode: str = "sample",
        temperature: float = 1.0,
        generators: Sequence[torch.Generator] = (),
    ) -> Acted:
        time.sleep(self.latency_s)
        num_tokens = CHUNK_LENGTH * ACTION_DIM
        bins = torch.stack(
            [torch.randint(NUM_BINS, (num_tokens,), generator=generator) for generator in generators]
        )
        logprobs = torch.full(bins.shape, -float(np.log(NUM_BINS)))
        actions = bins.double().numpy().reshape(-1, CHUNK_LENGTH, ACTION_DIM) / (NUM_BINS / 2) - 1
        return Acted(bins + FIRST_ACTION_TOKEN, logprobs, actions)
