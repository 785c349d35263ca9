"""The checks before the first episode: each finds its planted fault, and says in one line what repairs it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import experiment.setup
import preflight
from configs.cli import parse_train
from configs.config import TrainConfig, changed
from contracts import BadInput
from envs.assets import Pack
from experiment.setup import set_up
from tests.fakes import FakePolicy, observation
from vla.checkpoint import inspect_checkpoint

FLAGS = ["--preset", "smoke", "--device", "cpu", "--assets", "lowpoly"]


@pytest.fixture
def info(small):
    return inspect_checkpoint(small)


def test_initial_states_that_a_task_lacks_are_found_before_the_policy_is_loaded(monkeypatch):
    monkeypatch.setattr(experiment.setup, "load_policy", lambda *_: pytest.fail("it was loaded"))
    config = parse_train([*FLAGS, "--eval-init-states", "0", "51"]).config
    with pytest.raises(BadInput, match="50 initial"), set_up(config):
        pass


def test_a_place_that_cannot_be_written_is_found_first(tmp_path):
    with pytest.raises(BadInput, match="--output"):
        preflight.check_machine(changed(TrainConfig(), output="/dev/null/runs"))
    with pytest.raises(BadInput, match=str(tmp_path)):
        preflight.check_machine(TrainConfig(), resume=str(tmp_path))


@pytest.mark.parametrize(
    ("trained_on", "shown", "is_known"),
    [
        ((), "lowpoly", False),  # without a word on looks it was trained on the official ones
        (("12ab34cd",), "official", False),
        (("12ab34cd",), "own", True),
        (("lowpoly", "official"), "lowpoly", True),
    ],
)
def test_pictures_that_the_policy_was_not_trained_on_are_a_warning(
    info, trained_on, shown, is_known, monkeypatch
):
    monkeypatch.setattr("envs.assets._digest", lambda _: "12ab34cd")
    warning = preflight.looks_warning(replace(info, looks=trained_on), Pack(shown, Path("/pack")))
    assert (warning is None) == is_known


def test_a_camera_that_draws_nothing_is_found():
    images = np.random.default_rng(0).integers(0, 256, size=(2, 8, 8, 3), dtype=np.uint8)
    preflight.check_first_frame(images)
    images[1] = 7
    with pytest.raises(BadInput, match="empty"):
        preflight.check_first_frame(images)


def test_a_critic_without_the_simulators_state_is_refused_before_the_first_rollout(info):
    config = parse_train(["--preset", "tiny", "--advantage", "gae", "--assets", "lowpoly"]).config
    policy = FakePolicy()
    policy.info = info
    seen = replace(observation(1.0), images=np.eye(3, dtype=np.uint8)[None, :, :, None] * 255, state=None)
    setup = SimpleNamespace(config=config, learner=SimpleNamespace(policy=policy), observation=seen)
    with pytest.raises(BadInput, match=r"--advantage gae needs Observation\.state"):
        preflight.probe(setup)
