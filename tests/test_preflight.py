"""The checks before the first episode: each finds its planted fault, and says in one line what repairs it."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import preflight
import train_grpo
from configs.cli import parse_train
from configs.sections import ModelConfig, PhaseConfig, RunConfig, TaskConfig
from contracts import GIB, BadInput
from envs.assets import Pack
from experiment import machine_checks
from experiment.first_observations import FirstObservations
from experiment.setup import load_policy
from experiment.simulators import SimulatorCount
from experiment.start_times import StartTimes
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
    with preflight.set_up(parse_train(flags), StartTimes()):
        pass


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--task-id", "10"], r"0\.\.9"),
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


def test_a_disk_that_is_too_small_is_found_before_the_run(monkeypatch, tmp_path):
    policy = FakePolicy()
    run = RunConfig(output=str(tmp_path / "not" / "yet" / "there"), keep_checkpoints=3)
    trained = sum(p.numel() for _, p in policy.named_trainable_parameters())
    # Three kept, the best, one being written: float32 and two moments each.
    needed = 5 * 12 * trained + GIB // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed + 1))
    assert machine_checks.check_disk(run, policy).status == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    with pytest.raises(BadInput, match="--output"):
        machine_checks.check_disk(run, policy)


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
    ("base", "suite", "key", "repair"),
    [
        ("owner/Openvla-oft-SFT-libero10-traj1", "libero_10", None, None),
        ("owner/Openvla-oft-SFT-libero10-traj1", "libero_spatial", None, "--task-suite"),
        ("my-policy", "libero_goal", None, None),
        ("my-policy", "libero_goal", "libero_object_no_noops", "--unnorm-key"),
    ],
)
def test_a_checkpoint_or_statistics_of_another_suite_are_a_warning(info, base, suite, key, repair):
    check = preflight.check_suite(info, ModelConfig(base, key), suite)
    action = info.statistics[key or f"{suite}_no_noops"].action
    assert f"actions from [{action.q01[0]:.2f} " in check.text
    assert check.status == ("warning" if repair else "ok")
    assert (repair or "") in check.text


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
        ((), "metaworld", None),
        (("metaworld",), "metaworld", None),
        (("lowpoly",), "metaworld", "use another --checkpoint"),
        (("metaworld",), "lowpoly", "use another --checkpoint"),
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


class SeesSoMuch(FakePolicy):
    """Its logits are scaled by 1 + eyes x the brightness of the image."""

    info = SimpleNamespace(uses_proprio=False)

    def __init__(self, eyes: float, is_trained: bool):
        super().__init__()
        self.eyes = eyes
        self.is_trained = is_trained

    def chunk_logits(self, observations):
        brightness = torch.tensor([seen.images.mean() / 255 for seen in observations])
        return (1 + self.eyes * brightness)[:, None, None] * super().chunk_logits(observations)

    def logits_and_other_logsumexp(self, observations):
        logits = self.chunk_logits(observations)
        other = -5.0 if self.is_trained else 5.0
        return logits, logits.logsumexp(-1) + other


@pytest.mark.parametrize(
    ("eyes", "is_trained", "status"),
    [(0.0, True, "warning"), (0.01, True, "warning"), (1.0, True, "ok"), (0.0, False, "ok")],
)
def test_a_policy_that_hardly_looks_is_a_warning_unless_its_token_head_is_untrained(eyes, is_trained, status):
    dark = observation(0.3, -0.2, 0.9)
    bright = replace(dark, images=np.full_like(dark.images, 255))
    observations = FirstObservations(dark, [bright])
    check = preflight.check_eyes(SeesSoMuch(eyes, is_trained), observations, TaskConfig())
    assert check.status == status
    assert ("another image moves the decision by" in check.text) is is_trained


def test_without_another_image_nothing_is_said_about_eyes():
    observations = FirstObservations(observation(0.3, -0.2, 0.9), [])
    check = preflight.check_eyes(SeesSoMuch(0.0, is_trained=True), observations, TaskConfig())
    assert check.status == "ok"


def test_a_critic_without_the_simulators_state_is_refused_before_the_first_rollout(monkeypatch):
    without_state = SimpleNamespace(first=replace(observation(1.0), state=None))
    monkeypatch.setattr(preflight, "first_observations", lambda *_: without_state)
    monkeypatch.setattr(preflight, "check_first_frame", lambda images: preflight.Check("ok", ""))
    config = parse_train(["--preset", "tiny", "--advantage", "gae"]).config
    with pytest.raises(BadInput, match=r"--advantage gae needs Observation\.state"):
        preflight.try_out(preflight.Checks(StartTimes()), config, FakePolicy(), pool=None)


def test_a_run_of_several_ranks_is_not_trained_by_one_process():
    config = parse_train(["--preset", "tiny", "--data-parallel"]).config
    with pytest.raises(BadInput, match="torchrun"):
        train_grpo.run_training(config)
