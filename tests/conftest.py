"""Settings of the whole suite. Fixtures import what takes seconds: who only hands out tests reads this file, too."""

from __future__ import annotations

import gc
import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from command_line import STOP_SIGNALS
from contracts import Observation

if TYPE_CHECKING:
    from vla.policy import Policy

# Tensors here are small: threads that wait for one another on a busy machine cost more than they bring (16 times more).
# Torch reads this when it is imported; programs under test inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

# Programs under test keep ignoring what is ignored: SIGHUP if the tests run under nohup, SIGINT if in the background.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: it would make a test depend on how busy the machine is. Derandomised: a failure here repeats anywhere.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _no_log_file_outlives_its_test():
    """A run adds its file to the root logger; the file is deleted with the test's folder."""
    yield
    for handler in list(logging.root.handlers):
        if type(handler) is logging.FileHandler:
            logging.root.removeHandler(handler)
            handler.close()


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A small random checkpoint: two images, proprio and an L1 head. Nobody may change it."""
    from tests.small_checkpoint import make_small_checkpoint

    return make_small_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint", l1_head=True)


@pytest.fixture(scope="session")
def small_one_image(tmp_path_factory) -> Path:
    """A small random checkpoint: one image, no proprio and no L1 head. Nobody may change it."""
    from tests.small_checkpoint import make_small_checkpoint

    folder = tmp_path_factory.mktemp("small_one_image") / "checkpoint"
    return make_small_checkpoint(folder, num_images=1, proprio=False)


@pytest.fixture
def policy(small) -> Policy:
    """That of the small checkpoint, on the CPU."""
    from tests.small_checkpoint import load_policy

    return load_policy(small)


@pytest.fixture(scope="session")
def observations(small) -> list[Observation]:
    """Three for the small checkpoint. Their instructions have different lengths, so that the batch is padded."""
    from vla.dataset_statistics import load_statistics
    from vla.preprocessing import synthetic_observations

    instructions = ("open the drawer", "pick up the black bowl between the plate and the ramekin", "push it")
    plain = synthetic_observations(2, load_statistics(small)["libero_spatial_no_noops"].proprio, count=3)
    return [replace(one, instruction=text) for one, text in zip(plain, instructions, strict=True)]


@pytest.fixture
def fifo(tmp_path) -> Path:
    """A named pipe: whoever opens one end waits until somebody opens the other."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def own_signals(monkeypatch):
    """For `run_as_ranks` in this process: it handles signals, and ranks that do not go by themselves go soon."""
    from rl import launcher

    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    monkeypatch.setattr(launcher, "GRACE_S", 0.5)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def pytest_collection_finish():
    """What the imports have made is never garbage: without this every collection looks through all of it (0.3 s)."""
    gc.freeze()
