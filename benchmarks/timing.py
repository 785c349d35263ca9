"""Time a call and make observations of noise, for several benchmarks."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from contracts import Observation
from vla.policy import Policy

INSTRUCTION = "pick up the black bowl between the plate and the ramekin and place it on the plate"


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of `repeats` calls, each until the GPU is idle again; two calls before are not counted."""
    durations = []
    for i in range(repeats + 2):
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i >= 2:
            durations.append(time.perf_counter() - started)
    return median(durations)


def make_observations(policy: Policy, count: int, prepared: bool = True) -> list[Observation]:
    """Make `count` observations of noise; if `prepared`, preprocess them, as the simulators' processes do in a run."""
    generator = np.random.default_rng(0)
    frames = generator.integers(0, 256, (count, policy.num_images, 256, 256, 3), dtype=np.uint8)
    return [
        Observation(
            policy.model_inputs.prepare_images(images) if prepared else images,
            np.zeros(8),
            INSTRUCTION,
            prepared,
        )
        for images in frames
    ]
