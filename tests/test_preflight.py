"""The checks before the first episode: each finds its planted fault and says so in one sentence."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import preflight
from assembly import Teacher
from configs.config import EvaluationConfig, PhaseConfig, PolicyConfig, TaskConfig, TrainConfig, UpdateConfig
from envs.libero import EnvSpec
from envs.tasks import TaskInfo
from errors import BadInput
from preflight import check_frame, check_init_states, check_memory, check_setup, describe_device, first_observation
from rl.selfcheck import SelfCheckError
from tests.fakes import FakeObservation, FakePolicy, FakePool, Script

CONFIG = TrainConfig(update=UpdateConfig(micro_batch_size=1))  # as after `assembly.fit_to_memory`
TASK = TaskInfo(0, "pick_up_the_bowl", "pick up the bowl", 220, 50)


def seen(spread: int = 255) -> FakeObservation:
    """Two cameras of noise."""
    images = np.random.default_rng(0).integers(0, spread + 1, size=(2, 8, 8, 3), dtype=np.uint8)
    return FakeObservation(images, np.zeros(3))


class ClearPool(FakePool):
    """A pool whose cameras show something."""

    def ready(self, timeout_s=None):
        return [
            (slot, result if result.observation is None else replace(result, observation=seen()))
            for slot, result in super().ready(timeout_s)
        ]


def pool(**script) -> FakePool:
    return ClearPool(lambda *_: Script(8, **script), num_slots=3)


@pytest.fixture
def policy() -> FakePolicy:
    policy = FakePolicy()
    policy.device, policy.network = torch.device("cpu"), SimpleNamespace(dtype=torch.float32)
    return policy


@pytest.fixture(autouse=True)
def _probes_of_a_network_pass(monkeypatch):
    """tests/test_probes.py is about them; the fake policy has no network to probe."""
    monkeypatch.setattr(preflight, "attention_probe", lambda _: "attention is fine")
    monkeypatch.setattr(preflight, "image_probe", lambda _: "images are fine")
    monkeypatch.setattr(preflight, "action_mass_probe", lambda *_, **__: "the token head is fine")


def failing(message: str, kind=BadInput):
    def probe(_):
        raise kind(message)

    return probe


# all checks


def test_a_good_setup_gives_the_first_observation_of_the_first_training_state(policy):
    simulator = pool()
    config = replace(CONFIG, task=TaskConfig(train_init_states=(7, 40)))
    observation = check_setup(config, policy, simulator, [TASK])
    assert simulator.started == [(0, 7)]
    assert np.array_equal(observation.images, seen().images)
    assert all(p.grad is None for _, p in policy.named_trainable_parameters())


def test_a_training_run_stops_at_the_first_failure(policy, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "attention_probe", failing("attention is causal"))
    monkeypatch.setattr(preflight, "image_probe", failing("never reached"))
    with pytest.raises(BadInput, match="attention is causal"):
        check_setup(CONFIG, policy, pool(), [TASK])
    assert capsys.readouterr().out == ""


def test_check_only_shows_every_finding_and_then_fails(policy, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "attention_probe", failing("causal"))
    monkeypatch.setattr(preflight, "check_logits_path", lambda *_: failing("disagree", SelfCheckError)(None))
    with pytest.raises(BadInput, match="causal"):
        check_setup(CONFIG, policy, pool(), [TASK], show_all=True)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("causal", "images are fine", "disagree", "memory", "rendering", "device"))


def test_sampling_and_learning_are_compared_at_the_runs_temperature(policy, monkeypatch):
    asked = []
    monkeypatch.setattr(preflight, "check_logits_path", lambda *arguments: asked.append(arguments[2]) or "fine")
    config = CONFIG
    check_setup(replace(config, policy=replace(config.policy, temperature=1.6)), policy, pool(), [TASK])
    assert asked == [1.6]


def test_copies_between_devices_that_do_not_arrive_are_found(policy):
    policy.replicas = SimpleNamespace(are_equal=lambda: False)
    check_setup(CONFIG, policy, pool(), [TASK])  # one device: nothing to compare
    policy.devices = ("first", "second")
    with pytest.raises(BadInput, match="copies between the GPUs of this machine do not arrive"):
        check_setup(CONFIG, policy, pool(), [TASK])
    policy.replicas.are_equal = lambda: True
    check_setup(CONFIG, policy, pool(), [TASK])


def test_a_simulator_that_fails_at_once_is_bad_input():
    with pytest.raises(BadInput, match=r"failed at its first reset \(task 0\): planted fault"):
        first_observation(pool(faults=1), 0, 0)


# single checks


@pytest.mark.parametrize(("available", "fits"), [(50, True), (51, True), (49, False), (10, False)])
def test_a_task_needs_all_initial_states_that_are_configured(available, fits):
    tasks = [TASK, replace(TASK, task_id=3, num_init_states=available)]
    if fits:
        check_init_states(TaskConfig(), tasks)
        return
    with pytest.raises(BadInput, match=rf"task 3 .* has {available} initial states, but 50 are needed"):
        check_init_states(TaskConfig(), tasks)


def test_an_empty_frame_is_found_even_if_one_camera_works():
    assert check_frame(seen()) == "2 cameras of 8 x 8 pixels"
    dark = seen()
    dark.images[1] = 30
    with pytest.raises(BadInput, match="rendered frame is empty"):
        check_frame(dark)


def test_the_memory_check_runs_one_micro_batch_and_leaves_no_gradient(policy):
    policy.rows_run = 0
    assert check_memory(policy, seen(), 4) == "a backward pass reaches 2 of 2 trainable tensors"
    assert policy.rows_run == 4
    assert all(p.grad is None for _, p in policy.named_trainable_parameters())


def test_out_of_memory_names_the_flags_that_help(policy, monkeypatch):
    def too_much(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")

    monkeypatch.setattr(policy, "chunk_logits", too_much)
    with pytest.raises(BadInput) as caught:
        check_memory(policy, seen(), 4)
    assert "Tried to allocate 2 GiB" in str(caught.value)
    assert "--micro-batch-size" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("capability", "fits"), [((8, 9), True), ((8, 6), True), ((9, 0), True), ((12, 0), False)])
def test_a_gpu_that_torch_has_no_code_for_is_refused(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_86", "sm_90"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=24 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    if fits:
        assert describe_device(torch.device("cuda")) == "GPU, 24 GiB"
        return
    with pytest.raises(BadInput, match=r"compute capability 12\.0; it was built for sm_80, sm_86, sm_90"):
        describe_device(torch.device("cuda"))


def test_the_log_says_what_is_about_to_run(policy, caplog):
    caplog.set_level(logging.INFO, logger="train")
    spec, teacher = EnvSpec("libero_spatial", (0,)), Teacher("greedy", "because")
    preflight.log_setup(policy, spec, [TASK], teacher, Path("runs/RUN"))
    said = "\n".join(caplog.messages)
    for words in ("kind", "greedy: because", "pick up the bowl (at most 220 env steps)", "assets", "runs/RUN"):
        assert words in said


@pytest.mark.parametrize(
    ("head", "teacher", "warmup", "allowed", "needed"),
    [
        (None, "auto", True, False, True),
        (None, "auto", True, True, False),
        ("l1", "auto", True, False, False),
        ("l1", "greedy", True, False, True),
        ("l1", "auto", False, False, True),
    ],
)
def test_token_head_is_needed_unless_an_l1_teacher_warms_up(head, teacher, warmup, allowed, needed):
    config = TrainConfig(
        policy=PolicyConfig(teacher=teacher),
        phases=PhaseConfig(warmup=warmup),
        evaluation=EvaluationConfig(allow_zero_baseline=allowed),
    )
    assert preflight.needs_token_head(config, SimpleNamespace(action_head=head)) is needed
