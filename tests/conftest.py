"""Settings of the whole suite."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.small_checkpoint import make_small_checkpoint

# Tensors here are small: threads that wait for one another on a busy machine cost more than they bring (16 times more).
torch.set_num_threads(1)

# No deadline: it would make a test depend on how busy the machine is. Derandomised: a failure here repeats anywhere.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A small random checkpoint: two images, proprio and an L1 head. Nobody may change it."""
    return make_small_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint", l1_head=True)
