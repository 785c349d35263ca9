"""Which checks are made before the first episode, and what a failure leaves of the others."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import preflight
from assembly import Teacher
from configs.config import EvaluationConfig, PhaseConfig, PolicyConfig, TaskConfig, TrainConfig, UpdateConfig
from envs.libero import EnvSpec
from envs.tasks import TaskInfo
from errors import BadInput
from findings import Caution, Checks
from preflight import check_machine, check_only, check_setup
from rl.selfcheck import SelfCheckError
from tests.fakes import FakeObservation, FakePolicy, FakePool, Script
from tests.small_checkpoint import make_small_checkpoint
from vla.checkpoint import inspect_checkpoint

CONFIG = TrainConfig(  # as after `assembly.fit_to_memory`
    policy=PolicyConfig(checkpoint="owner/small"), update=UpdateConfig(micro_batch_size=1)
)
TASK = TaskInfo(0, "pick_up_the_bowl", "pick up the bowl", 220, 50)
POLICY_CHECKS = {"attention", "images", "token head", "log-probs", "memory", "learning"}


def seen() -> FakeObservation:
    """Two cameras of noise."""
    return FakeObservation(np.random.default_rng(0).integers(0, 256, size=(2, 8, 8, 3), dtype=np.uint8), np.zeros(3))


class ClearPool(FakePool):
    """A pool whose cameras show something."""

    def ready(self, timeout_s=None):
        return [
            (slot, result if result.observation is None else replace(result, observation=seen()))
            for slot, result in super().ready(timeout_s)
        ]


@pytest.fixture
def pool() -> FakePool:
    return ClearPool(lambda *_: Script(8), num_slots=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint that was trained on our pictures."""
    folder = make_small_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small")
    (folder / "sft_run.json").write_text("{}")
    return folder


@pytest.fixture
def policy(checkpoint) -> FakePolicy:
    policy = FakePolicy()
    policy.info = inspect_checkpoint(checkpoint)
    return policy


@pytest.fixture
def _fake_probes(monkeypatch):
    """tests/test_probes.py is about them; the fake policy has no network to probe."""
    monkeypatch.setattr(preflight, "attention_probe", lambda _: "attention is fine")
    monkeypatch.setattr(preflight, "image_probe", lambda _: "images are fine")
    monkeypatch.setattr(preflight, "action_mass_probe", lambda *_: "the token head is fine")


@pytest.fixture
def _fake_machine(monkeypatch):
    """tests/test_checks.py and tests/test_simulator_probes.py are about these."""
    monkeypatch.setattr(preflight, "check_rendering", lambda has_gpu: "renders")
    monkeypatch.setattr(preflight, "check_physics", lambda: "settles")
    monkeypatch.setattr(preflight, "observe_apart", lambda config, spec: replace(seen(), proprio=np.zeros(8)))


def failing(message: str, kind=BadInput):
    def probe(*_):
        raise kind(message)

    return probe


def statuses(output: str) -> dict[str, str]:
    """Of --check-only: what became of each check."""
    found = {}
    for line in output.splitlines():
        for status in ("ok", "warning", "FAILED", "skipped"):
            if line.startswith(f"{status:8} "):
                found[line[9:23].strip()] = status
    return found


# before a run


@pytest.mark.usefixtures("_fake_probes")
def test_a_good_setup_gives_the_first_observation_of_the_first_training_state(policy, pool, capsys):
    config, checks = replace(CONFIG, task=TaskConfig(train_init_states=(7, 40))), Checks()
    observation = check_setup(checks, config, policy, pool, [TASK])
    assert pool.started == [(0, 7)]
    assert np.array_equal(observation.images, seen().images)
    assert all(p.grad is None for _, p in policy.named_trainable_parameters())
    assert {finding.check for finding in checks.findings} == POLICY_CHECKS | {
        "checkpoint", "statistics", "suite", "looks", "disk", "initial states", "first frame",
    }  # fmt: skip
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("_fake_probes")
def test_a_training_run_stops_at_the_first_failure(policy, pool, monkeypatch):
    monkeypatch.setattr(preflight, "attention_probe", failing("attention is causal"))
    monkeypatch.setattr(preflight, "image_probe", failing("never reached"))
    with pytest.raises(BadInput, match="attention is causal"):
        check_setup(Checks(), CONFIG, policy, pool, [TASK])


@pytest.mark.usefixtures("_fake_machine")
def test_the_machine_is_checked_before_the_policy_is_loaded(config, monkeypatch):
    checks = Checks()
    assert check_machine(checks, config).type == "cpu"
    assert [finding.check for finding in checks.findings] == [
        "versions", "device", "rendering", "host memory", "wandb",
    ]  # fmt: skip
    monkeypatch.setattr(preflight, "check_rendering", failing("no EGL; run: apt-get"))
    with pytest.raises(BadInput, match="no EGL; run: apt-get"):
        check_machine(Checks(), config)


@pytest.mark.usefixtures("_fake_probes")
def test_sampling_and_learning_are_compared_at_the_runs_temperature(policy, pool, monkeypatch):
    asked = []
    monkeypatch.setattr(preflight, "check_logits_path", lambda *arguments: asked.append(arguments[2]) or "fine")
    config = replace(CONFIG, policy=replace(CONFIG.policy, temperature=1.6))
    check_setup(Checks(), config, policy, pool, [TASK])
    assert asked == [1.6]


@pytest.mark.usefixtures("_fake_probes")
def test_several_devices_are_compared(policy, pool):
    policy.replicas = SimpleNamespace(are_equal=lambda: False)
    check_setup(Checks(), CONFIG, policy, pool, [TASK])  # one device: nothing to compare
    policy.devices = ("first", "second")
    with pytest.raises(BadInput, match="copies between the GPUs of this machine do not arrive"):
        check_setup(Checks(), CONFIG, policy, pool, [TASK])


def test_the_log_says_what_is_about_to_run_and_what_the_checks_found(policy, caplog):
    caplog.set_level(logging.INFO, logger="train")
    spec, teacher, checks = EnvSpec("libero_spatial", (0,)), Teacher("greedy", "because"), Checks()
    checks.make("rendering", lambda: Caution("llvmpipe renders slowly; set NVIDIA_DRIVER_CAPABILITIES"))
    preflight.log_setup(CONFIG, policy, spec, [TASK], teacher, Path("runs/RUN"), checks)
    said = "\n".join(caplog.messages)
    for words in (
        "kind", "2 decisions a step, 1 at a time", "greedy: because",
        "pick up the bowl (at most 220 env steps)", "assets", "runs/RUN",
        "1 checks in 0.0 s: 1 warning", "rendering: llvmpipe renders slowly; set NVIDIA",
    ):  # fmt: skip
        assert words in said


# --check-only


@pytest.fixture
def config(checkpoint, tmp_path) -> TrainConfig:
    return TrainConfig(
        policy=PolicyConfig(checkpoint=str(checkpoint), device="cpu"),
        evaluation=EvaluationConfig(allow_zero_baseline=True),  # its head has random weights
    )


@pytest.mark.usefixtures("_fake_machine", "_fake_probes")
def test_check_only_makes_every_check(config, capsys):
    check_only(config)
    found = statuses(capsys.readouterr().out)
    assert set(found) == POLICY_CHECKS | {
        "versions", "rendering", "host memory", "wandb", "device", "checkpoint", "statistics", "suite", "looks",
        "teacher", "weights", "micro-batch", "disk", "physics", "tasks", "initial states", "first frame",
    }  # fmt: skip
    assert set(found.values()) == {"ok"}


@pytest.mark.usefixtures("_fake_machine")
def test_a_bad_checkpoint_leaves_the_machine_and_the_simulator(config, tmp_path, capsys):
    config = replace(config, policy=replace(config.policy, checkpoint=str(tmp_path)))
    with pytest.raises(BadInput, match=rf"1 of 23 checks FAILED; checkpoint: {tmp_path}.*config\.json"):
        check_only(config)
    found = statuses(capsys.readouterr().out)
    assert {found[name] for name in ("versions", "rendering", "device", "disk", "physics", "tasks", "first frame")} == {
        "ok"
    }
    assert {found[name] for name in (*POLICY_CHECKS, "statistics", "suite", "teacher", "weights")} == {"skipped"}


@pytest.mark.usefixtures("_fake_machine")
def test_a_suite_without_a_checkpoint_is_one_failure(config, capsys):
    config = replace(config, policy=replace(config.policy, checkpoint=None))
    with pytest.raises(BadInput, match=r"1 of 23 checks FAILED; device: no public checkpoint .* --checkpoint"):
        check_only(config)
    assert statuses(capsys.readouterr().out)["checkpoint"] == "skipped"


@pytest.mark.parametrize(
    ("checkpoint", "name"), [("Haozhan72/Openvla-libero10", "Openvla-libero10"), ("checkpoints/../checkpoints/x/", "x")]
)
def test_a_checkpoint_is_known_by_the_last_part_of_its_name(checkpoint, name):
    assert preflight.name_of(checkpoint) == name


@pytest.mark.usefixtures("_fake_machine", "_fake_probes")
def test_a_driver_that_does_not_render_leaves_the_policy(config, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "check_rendering", failing("no EGL; run: apt-get"))
    with pytest.raises(BadInput, match="rendering: no EGL; run: apt-get"):
        check_only(config)
    found = statuses(capsys.readouterr().out)
    assert {found[name] for name in ("physics", "first frame", "token head")} == {"skipped"}
    assert {found[name] for name in ("weights", "attention", "images", "log-probs", "memory", "tasks")} == {"ok"}


@pytest.mark.usefixtures("_fake_machine", "_fake_probes")
def test_another_mujoco_leaves_rendering_and_the_policy(config, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "check_installed", failing("mujoco 3.8.1; run: pip install mujoco==3.3.0"))
    with pytest.raises(BadInput, match=r"versions: mujoco 3\.8\.1; run: pip install"):
        check_only(config)
    found = statuses(capsys.readouterr().out)
    assert {found[name] for name in ("physics", "first frame", "token head")} == {"skipped"}
    assert {found[name] for name in ("rendering", "weights", "attention", "log-probs", "memory")} == {"ok"}


@pytest.mark.usefixtures("_fake_machine", "_fake_probes")
def test_all_failures_are_shown(config, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "attention_probe", failing("causal"))
    monkeypatch.setattr(preflight, "check_logits_path", failing("disagree", SelfCheckError))
    config = replace(config, task=TaskConfig(task_ids=(77,)))
    with pytest.raises(BadInput, match="3 of 23 checks FAILED; tasks: unknown task id 77"):
        check_only(config)
    output = capsys.readouterr().out
    failed = {name for name, status in statuses(output).items() if status == "FAILED"}
    assert failed == {"tasks", "attention", "log-probs"}
    assert "causal" in output
    assert "disagree" in output


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
