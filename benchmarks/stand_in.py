"""A policy that costs time and nothing else: it stands for a network on a GPU, during whose work the cores are free."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

CHUNK = 8
FIRST_ACTION_TOKEN, NUM_BINS = 31744, 256


@dataclass(frozen=True)
class Acted:
    tokens: torch.Tensor  # (B, 56)
    logprobs: torch.Tensor  # (B, 56)
    actions: np.ndarray  # (B, 8, 7)


class StandInPolicy:
    """Uniformly random tokens, drawn from the generator of each observation; every call sleeps `latency_s`."""

    device = torch.device("cpu")

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.batches: list[int] = []  # size of every call

    def act(
        self,
        observations: Sequence,
        mode: str = "sample",
        temperature: float = 1.0,
        generators: Sequence[torch.Generator] = (),
        correlation: float = 0.0,
    ) -> Acted:
        self.batches.append(len(observations))
        time.sleep(self.latency_s)
        bins = torch.stack([torch.randint(NUM_BINS, (CHUNK * 7,), generator=g) for g in generators])
        logprobs = torch.full(bins.shape, -float(np.log(NUM_BINS)))
        actions = bins.double().numpy().reshape(-1, CHUNK, 7) / (NUM_BINS / 2) - 1
        return Acted(bins + FIRST_ACTION_TOKEN, logprobs, actions)
