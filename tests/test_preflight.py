"""The checks before the first episode: each finds its planted fault, and says in one sentence what repairs it."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import preflight
from configs.config import (
    EvaluationConfig,
    ModelConfig,
    PhaseConfig,
    RunConfig,
    SimulatorConfig,
    TaskConfig,
    TrainConfig,
    UpdateConfig,
    changed,
)
from contracts import BadInput, Observation, SelfCheckError, read_json, write_json
from envs.assets import Pack
from envs.worker import NoAnswer
from preflight import Checks, check_only, check_setup, load_policy, load_teacher
from rl import selfcheck
from rl.selfcheck import Caution
from tests.fakes import FakePolicy, FakePool, Script
from tests.small_checkpoint import make_small_checkpoint
from vla.checkpoint import inspect_checkpoint

GIB = 2**30
POLICY_CHECKS = {"attention", "images", "token head", "log-probs", "learning"}
GPU = torch.device("cuda")


def seen(spread: int = 255) -> Observation:
    """Two cameras of noise."""
    images = np.random.default_rng(0).integers(0, spread + 1, size=(2, 8, 8, 3), dtype=np.uint8)
    return Observation(images, np.zeros(3), "pick up the bowl")


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
    write_json(folder / "config.json", read_json(folder / "config.json") | {"looks": ["lowpoly"]})
    return folder


@pytest.fixture
def config(checkpoint) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(checkpoint=str(checkpoint), device="cpu"),
        simulator=SimulatorConfig(assets="lowpoly"),
        update=UpdateConfig(micro_batch_size=1),
        evaluation=EvaluationConfig(allow_zero_baseline=True),  # its head has random weights
    )


@pytest.fixture
def policy(checkpoint) -> FakePolicy:
    policy = FakePolicy()
    policy.info = inspect_checkpoint(checkpoint)
    return policy


@pytest.fixture
def _fake_probes(monkeypatch):
    """tests/test_selfcheck.py is about them; the fake policy has no network to probe."""
    for name in ("attention_probe", "image_probe", "token_probe"):
        monkeypatch.setattr(selfcheck, name, lambda *_: "fine")


@pytest.fixture
def _fake_machine(monkeypatch):
    monkeypatch.setattr(preflight, "check_rendering", lambda: "renders")
    clear = replace(seen(), proprio=np.zeros(8))
    monkeypatch.setattr(preflight, "first_frame_apart", lambda *_: (clear, "two cameras"))


def failing(message: str, kind=BadInput):
    def check(*_):
        raise kind(message)

    return check


def answering(answer):
    """In place of `ask`: gives an answer, or raises it."""
    return failing(str(answer), NoAnswer) if isinstance(answer, NoAnswer) else lambda _: answer


def statuses(output: str) -> dict[str, str]:
    """Of --check-only: what became of each check."""
    lines = [line for line in output.splitlines() if line[:9].rstrip() in preflight.STATUSES]
    return {line[9:23].strip(): line[:9].rstrip() for line in lines}


# findings


def test_every_finding_is_one_line(capsys, caplog):
    checks = Checks(show_all=True)
    checks.make("good", lambda: "fine")
    checks.make("slow", lambda: Caution("software rendering; unset MUJOCO_GL"))
    broken = checks.make("broken", failing("no such folder: " + "long " * 60))
    checks.make("wrong", failing("disagree", SelfCheckError))
    checks.make("dependent", lambda: "never made", broken)
    checks.make("odd", failing("by zero\nsecond line", ZeroDivisionError))
    # A traceback goes where the log goes: to the terminal, too, once a program of this process has said so.
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if line[:9].rstrip() in preflight.STATUSES]
    assert [line.split()[:2] for line in lines] == [
        ["ok", "good"], ["warning", "slow"], ["FAILED", "broken"], ["FAILED", "wrong"], ["skipped", "dependent"],
        ["FAILED", "odd"],
    ]  # fmt: skip
    assert all("0.0 s" in line for line in lines)
    assert "ZeroDivisionError: by zero (a fault: its traceback is above)" in lines[-1]
    assert "Traceback" in caplog.text
    with pytest.raises(BadInput, match="3 of 6 checks FAILED; broken: no such folder"):
        checks.conclude()
    assert "1 ok, 1 warning, 3 FAILED, 1 skipped" in capsys.readouterr().out


# before a run


@pytest.mark.parametrize(
    ("head", "teacher", "warmup", "allowed", "needed"),
    [
        (None, "auto", True, False, True), (None, "auto", True, True, False), ("l1", "auto", True, False, False),
        ("l1", "greedy", True, False, True), ("l1", "auto", False, False, True),
        (None, "some/other", True, False, False), (None, "some/other", False, False, True),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("_fake_probes")
def test_a_token_head_is_needed_unless_an_l1_teacher_warms_up(
    head, teacher, warmup, allowed, needed, policy, pool, config, monkeypatch
):
    asked = []
    monkeypatch.setattr(selfcheck, "token_probe", lambda *arguments: asked.append(arguments[2]) or "fine")
    config = replace(
        config,
        phases=PhaseConfig(teacher=teacher, warmup=warmup),
        evaluation=EvaluationConfig(allow_zero_baseline=allowed),
    )
    policy.action_head = head
    check_setup(Checks(), config, policy, pool)
    assert [bool(needs) for needs in asked] == [needed]


def test_what_is_wrong_with_another_teacher_is_said_with_its_flag(checkpoint, config, tmp_path):
    policy = load_policy(config.model, "libero_spatial")
    teacher = make_small_checkpoint(tmp_path / "teacher", num_images=1)
    for name, said in ((str(teacher), "it reads 1 image"), ("gredy", "no such folder")):
        with pytest.raises(BadInput, match=f"--teacher {name}: .*{said}"):
            load_teacher(changed(config, teacher=name), policy)
    assert load_teacher(changed(config, teacher=str(checkpoint)), policy).mode == "greedy"


# --check-only


@pytest.mark.usefixtures("_fake_machine")
def test_a_bad_checkpoint_leaves_the_machine_and_the_simulator(config, tmp_path, capsys):
    config = replace(config, model=replace(config.model, checkpoint=str(tmp_path)))
    with pytest.raises(BadInput, match=rf"1 of 19 checks FAILED; checkpoint: {tmp_path}.*config\.json"):
        check_only(config)
    found = statuses(capsys.readouterr().out)
    assert {found[name] for name in ("versions", "rendering", "device", "tasks", "first frame")} == {"ok"}
    assert {found[name] for name in (*POLICY_CHECKS, "suite", "teacher", "weights", "disk")} == {"skipped"}


# machine


def test_the_renderer_is_named_and_software_beside_a_gpu_is_a_caution(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight, "ask", answering("EGL device 1: NVIDIA H100/PCIe (NVIDIA Corporation)"))
    finding = preflight.check_rendering()
    assert finding == "EGL device 1: NVIDIA H100/PCIe (NVIDIA Corporation)"
    assert not isinstance(finding, Caution)
    monkeypatch.setattr(preflight, "ask", answering("OSMesa: llvmpipe (Mesa)"))
    finding = preflight.check_rendering()
    assert isinstance(finding, Caution)
    assert "although there is a GPU; run: unset MUJOCO_GL" in finding
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not isinstance(preflight.check_rendering(), Caution)
    monkeypatch.setattr(preflight, "ask", answering(NoAnswer("the process ended with SIGSEGV")))
    with pytest.raises(
        BadInput, match=r"no frame can be rendered \(.*SIGSEGV\); run: apt-get install libegl1"
    ):
        preflight.check_rendering()


def test_a_disk_that_is_too_small_is_found_before_the_run(monkeypatch, tmp_path):
    policy = FakePolicy()
    run = RunConfig(output=str(tmp_path / "not" / "yet" / "there"), keep_checkpoints=3)
    numbers = sum(p.numel() for _, p in policy.named_trainable_parameters())
    needed = (
        5 * 12 * numbers + GIB // 2
    )  # three kept, the best, one being written: float32 and two moments each
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed + 1))
    assert "5 checkpoints" in preflight.check_disk(run, policy)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    with pytest.raises(BadInput, match=r"another disk with --output, or lower --keep-checkpoints"):
        preflight.check_disk(run, policy)


# checkpoint, tasks and frames


@pytest.fixture
def info(small):
    return inspect_checkpoint(small)


@pytest.mark.parametrize(
    ("base", "suite", "key", "said"),
    [
        ("owner/Openvla-oft-SFT-libero10-traj1", "libero_10", None, None),
        (
            "owner/Openvla-oft-SFT-libero10-traj1",
            "libero_spatial",
            None,
            "libero10-traj1 is of another suite",
        ),
        ("my-policy", "libero_goal", None, None),
        ("my-policy", "libero_goal", "libero_object_no_noops", "leave out --unnorm-key"),
    ],
)
def test_a_checkpoint_or_statistics_of_another_suite_are_a_caution(info, base, suite, key, said):
    finding = preflight.check_suite(info, ModelConfig(base, key), suite)
    action = info.statistics[key or f"{suite}_no_noops"].action
    assert f"_no_noops: actions from [{action.q01[0]:.2f} " in finding
    assert isinstance(finding, Caution) is (said is not None)
    assert (said or "") in finding


@pytest.mark.parametrize(
    ("trained_on", "shown", "advice"),
    [
        ((), "official", None),
        ((), "lowpoly", "as most were: its folder does not say; use --assets official"),
        (("lowpoly",), "official", "trained on lowpoly; use --assets lowpoly"),
        (("official",), "own", "trained on official; use --assets official"),
        (("12ab34cd",), "official", "use --assets the folder of pack 12ab34cd"),
        (("lowpoly", "official"), "lowpoly", None),
    ],
)
def test_pictures_that_the_policy_was_not_trained_on_are_a_caution(
    info, trained_on, shown, advice, monkeypatch
):
    monkeypatch.setattr(preflight, "find_pack", lambda _: Pack(shown, Path("/pack"), "12ab34cd"))
    finding = preflight.check_looks(replace(info, looks=trained_on), shown)
    assert isinstance(finding, Caution) is (advice is not None)
    assert finding.endswith(advice or f"{shown} (12ab34cd)")


@pytest.mark.parametrize(
    ("assets", "name", "known", "device", "gpu", "installed", "expected"),
    [
        ("auto", "owner/openvla-7b", (), "cpu", False, False, "official"),  # which then says what to install
        ("auto", "small", (), "auto", False, True, "lowpoly"),
        ("auto", "small", ("lowpoly", "official"), "auto", True, True, "official"),
        ("auto", "small", ("lowpoly",), "auto", True, True, "lowpoly"),
        ("auto", "small", (), "auto", True, False, "lowpoly"),
    ],
)
def test_auto_is_official_and_low_poly_only_where_pictures_would_slow_a_small_policy_down(
    assets, name, known, device, gpu, installed, expected, checkpoint, info, monkeypatch
):
    monkeypatch.setattr(preflight, "find_checkpoint", lambda _: (replace(info, looks=known), ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(preflight, "installed_official", lambda: Path("/there") if installed else None)
    monkeypatch.setattr(preflight, "find_pack", lambda assets: Pack("own", Path("/there"), assets))
    name = str(checkpoint) if name == "small" else name
    config, finding = preflight.choose_looks(
        changed(TrainConfig(), assets=assets, checkpoint=name, device=device)
    )
    assert (config.simulator.assets, finding) == (expected, f"own ({expected}): /there")


def test_a_task_needs_all_initial_states_that_are_configured():
    _, finding = preflight.find_tasks(TrainConfig(TaskConfig("libero_goal", (7,))), num_images=1)
    assert finding == "7 turn on the stove"
    fresh = TrainConfig(TaskConfig("libero_goal", (7,), train_init_states="fresh", eval_init_states=(0, 50)))
    assert preflight.find_tasks(fresh, num_images=1)[1] == finding
    with pytest.raises(BadInput, match=r"task 7 .* has only 50 initial states: lower --train-init-states"):
        preflight.find_tasks(
            TrainConfig(TaskConfig("libero_goal", (7,), eval_init_states=(40, 51))), num_images=1
        )


def test_a_simulator_that_fails_at_once_or_draws_nothing_is_bad_input(pool):
    pool_of_faults = FakePool(lambda *_: Script(8, faults=1), num_slots=1)
    with pytest.raises(BadInput, match=r"failed at its first reset \(task 0: planted fault\).*pip install"):
        preflight.check_first_frame(pool_of_faults, TaskConfig())
    _, finding = preflight.check_first_frame(pool, TaskConfig())
    assert finding.startswith("2 camera(s), 8 x 8 pixels, contrast ")
    dark = seen()
    dark.images[1] = 30  # even if one camera works
    dark_pool = SimpleNamespace(
        reset=lambda *_: None, ready=lambda: [(0, SimpleNamespace(error=None, observation=dark))]
    )
    with pytest.raises(BadInput, match=r"rendered frame is empty: .*MUJOCO_GL=osmesa"):
        preflight.check_first_frame(dark_pool, TaskConfig())
