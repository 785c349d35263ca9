"""The checks before the first episode: each finds its planted fault, and says in one line what repairs it."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import preflight
import train_grpo
from configs.cli import parse_train
from configs.sections import ModelConfig, PhaseConfig
from contracts import BadInput
from envs.assets import Pack
from experiment import machine_checks
from experiment.setup import load_policy
from experiment.simulators import SimulatorCount
from tests.fakes import FakePolicy, observation
from tests.small_checkpoint import make_small_checkpoint
from vla.checkpoint import inspect_checkpoint


def on_cpu(checkpoint: Path) -> ModelConfig:
    return ModelConfig(checkpoint=str(checkpoint), device="cpu")


@pytest.fixture(scope="module")
def without_head(tmp_path_factory) -> Path:
    """A checkpoint without an L1 head."""
    return make_small_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small")


@pytest.fixture
def info(small):
    return inspect_checkpoint(small)


def crash():
    """As a broken GL driver does."""
    os.kill(os.getpid(), signal.SIGSEGV)


# what comes first


def set_up(monkeypatch, *flags: str) -> None:
    """Set up `--check-only` on a machine that passes, until something fails."""
    monkeypatch.setattr(preflight, "check_machine", lambda *_: "OSMesa: llvmpipe (Mesa)")
    flags = ("--preset", "smoke", "--device", "cpu", "--assets", "lowpoly", "--check-only", *flags)
    with preflight.set_up(parse_train(flags)):
        pass


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--task-id", "10"], "no task 10"),
        (["--eval-init-states", "0", "51"], "50 initial states"),
        (["--output", "/dev/null/runs"], "--output"),
    ],
)
def test_what_is_wrong_with_tasks_or_output_is_found_before_the_policy_is_loaded(monkeypatch, flags, named):
    monkeypatch.setattr(preflight, "load_policy", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(BadInput, match=named):
        set_up(monkeypatch, *flags)


def test_a_teacher_that_the_checkpoint_does_not_have_is_bad_input(monkeypatch, without_head, tmp_path):
    with pytest.raises(BadInput, match="--teacher l1"):
        set_up(
            monkeypatch,
            *("--checkpoint", str(without_head), "--teacher", "l1", "--output", str(tmp_path)),
        )


# the machine


def test_software_that_renders_beside_a_gpu_is_a_warning(monkeypatch):
    for has_gpu, renderer, status in (
        (True, "EGL device 1: NVIDIA H100/PCIe (NVIDIA Corporation)", "ok"),
        (True, "OSMesa: llvmpipe (Mesa)", "warning"),
        (False, "OSMesa: llvmpipe (Mesa)", "ok"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        check = machine_checks.check_renderer(renderer)
        assert check.status == status
        assert renderer in check.text
        assert ("MUJOCO_GL" in check.text) is (status == "warning")


def test_a_machine_that_cannot_render_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(machine_checks, "find_renderer", crash)
    with pytest.raises(BadInput, match=r"no frame can be rendered .*apt-get install"):
        machine_checks.find_renderer_apart()


def test_simulators_that_do_not_fit_into_main_memory_are_a_warning(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    few = SimulatorCount(4, "4 cores", needed_gib=4.8, free_gib=5.0, gpu_gib=0.0)
    assert machine_checks.check_main_memory(few).status == "ok"
    check = machine_checks.check_main_memory(replace(few, num_envs=8, needed_gib=9.6))
    assert check.status == "warning"
    assert "--num-envs" in check.text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # each rank has as many
    check = machine_checks.check_main_memory(few)
    assert (check.status, "4 ranks need about 19.2 GiB" in check.text) == ("warning", True)


# checkpoint and frames


@pytest.mark.parametrize(
    ("trained_on", "shown", "advice"),
    [
        ((), "official", None),
        ((), "lowpoly", "--assets official"),
        (("lowpoly",), "official", "--assets lowpoly"),
        (("official",), "own", "--assets official"),
        (("12ab34cd",), "official", "--assets the folder of pack 12ab34cd"),
        (("12ab34cd",), "own", None),
        (("lowpoly", "official"), "lowpoly", None),
    ],
)
def test_pictures_that_the_policy_was_not_trained_on_are_a_warning(info, trained_on, shown, advice):
    check = preflight.check_looks(replace(info, looks=trained_on), Pack(shown, Path("/pack"), "12ab34cd"))
    assert check.status == ("warning" if advice else "ok")
    assert (advice or shown) in check.text


@pytest.mark.parametrize(
    ("has_head", "teacher", "warmup", "allowed", "needed"),
    [
        (False, "auto", True, False, True),
        (False, "auto", True, True, False),
        (True, "auto", True, False, False),
        (True, "greedy", True, False, True),
        (True, "auto", False, False, True),
        (False, "some/other", True, False, False),
        (False, "some/other", False, False, True),
    ],
)
def test_a_trained_token_head_is_needed_unless_an_l1_teacher_warms_up(
    has_head, teacher, warmup, allowed, needed, small, without_head
):
    """The small checkpoints have random token heads."""
    policy = load_policy(on_cpu(small if has_head else without_head), "libero_spatial")
    observation = preflight.selfcheck.made_up_observation(policy)
    phases = PhaseConfig(teacher=teacher, warmup=warmup, warmup_steps=100)
    if needed:
        with pytest.raises(BadInput, match="--allow-zero-baseline"):
            preflight.check_token_head(policy, observation, phases, allowed)
    else:
        assert preflight.check_token_head(policy, observation, phases, allowed).status == "ok"


def test_a_camera_that_draws_nothing_is_found():
    images = np.random.default_rng(0).integers(0, 256, size=(2, 8, 8, 3), dtype=np.uint8)
    assert preflight.check_first_frame(images).status == "ok"
    images[1] = 30  # even if the other one works
    with pytest.raises(BadInput, match="MUJOCO_GL"):
        preflight.check_first_frame(images)


def test_a_critic_without_the_simulators_state_is_refused_before_the_first_rollout(monkeypatch):
    without_state = replace(observation(1.0), state=None)
    monkeypatch.setattr(preflight, "first_observation", lambda *_: without_state)
    monkeypatch.setattr(preflight, "check_first_frame", lambda images: preflight.Check("ok", ""))
    config = parse_train(["--preset", "tiny", "--advantage", "gae"]).config
    with pytest.raises(BadInput, match=r"--advantage gae needs Observation\.state"):
        preflight.try_out(preflight.Checks(), config, FakePolicy(), pool=None)


def test_a_run_of_several_ranks_is_not_trained_by_one_process():
    config = parse_train(["--preset", "tiny", "--data-parallel"]).config
    with pytest.raises(BadInput, match="torchrun"):
        train_grpo.run_training(config)
