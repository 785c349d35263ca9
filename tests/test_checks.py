"""Single checks: each finds its planted fault, says in one sentence what repairs it, and passes without the fault."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import checks
from checks import (
    check_disk,
    check_frame,
    check_host_memory,
    check_init_states,
    check_installed,
    check_looks,
    check_memory,
    check_physics,
    check_rendering,
    check_replicas,
    check_statistics,
    check_suite,
    check_wandb,
    describe_checkpoint,
    describe_device,
    first_observation,
)
from configs.config import RunConfig, TaskConfig
from envs.assets import SUBFOLDERS
from envs.rendering import Renderer
from envs.tasks import TaskInfo
from envs.worker import NoAnswer
from errors import BadInput
from findings import Caution
from rl.selfcheck import SelfCheckError
from tests.fakes import FakeObservation, FakePolicy, FakePool, Script
from tests.small_checkpoint import make_small_checkpoint
from vla.checkpoint import inspect_checkpoint

GIB = 2**30
TASK = TaskInfo(0, "pick_up_the_bowl", "pick up the bowl", 220, 50)
GPU = torch.device("cuda")


def seen(spread: int = 255) -> FakeObservation:
    """Two cameras of noise."""
    images = np.random.default_rng(0).integers(0, spread + 1, size=(2, 8, 8, 3), dtype=np.uint8)
    return FakeObservation(images, np.zeros(3))


def answering(answer):
    """In place of `ask`: gives an answer, or raises it."""

    def ask(question):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return inspect_checkpoint(make_small_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small", l1_head=True))


# versions


def test_the_versions_that_decide_the_results_are_named(monkeypatch):
    finding = check_installed()
    assert all(name in finding for name in ("python 3", "torch", "transformers", "mujoco 3", "robosuite 1.4", "libero"))
    assert not isinstance(finding, Caution)
    monkeypatch.setattr(
        checks, "check_versions", lambda: "mujoco 3.3.5 draws otherwise; run: pip install mujoco==3.3.0"
    )
    assert isinstance(check_installed(), Caution)
    assert "pip install mujoco==3.3.0" in check_installed()


# GPU


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "RTX")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 24 * GIB))


def test_a_gpu_that_computes_is_named(gpu, monkeypatch):
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(2))
    assert describe_device(GPU) == "RTX, 24 GiB"
    assert describe_device(torch.device("cpu")).startswith("CPU, ")


def test_a_gpu_that_torch_has_no_code_for_is_found_by_computing(gpu, monkeypatch):
    def no_kernel(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore lines")

    monkeypatch.setattr(torch, "ones", no_kernel)
    with pytest.raises(BadInput) as caught:
        describe_device(GPU)
    for part in ("no code for RTX", "compute capability 12.0", "sm_80, sm_90", "run: pip install --upgrade torch"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gpu_that_others_have_filled_is_not_taken_for_an_old_torch(gpu, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.\nmore lines")

    monkeypatch.setattr(torch, "ones", full)
    with pytest.raises(BadInput, match=r"RTX does not compute \(CUDA out of memory.*nvidia-smi .*CUDA_VISIBLE_DEVICES"):
        describe_device(GPU)


# rendering and physics


def test_the_renderer_is_named(monkeypatch):
    monkeypatch.setattr(checks, "ask", answering(Renderer("egl", 1, "NVIDIA Corporation", "NVIDIA H100/PCIe")))
    assert check_rendering(has_gpu=True) == "EGL device 1: NVIDIA H100/PCIe (NVIDIA Corporation)"
    assert not isinstance(check_rendering(has_gpu=True), Caution)


@pytest.mark.parametrize(
    ("backend", "repair"), [("egl", "NVIDIA_DRIVER_CAPABILITIES=all"), ("osmesa", "unset MUJOCO_GL")]
)
def test_software_beside_a_gpu_is_a_caution(monkeypatch, backend, repair):
    monkeypatch.setattr(checks, "ask", answering(Renderer(backend, 0, "Mesa", "llvmpipe")))
    assert not isinstance(check_rendering(has_gpu=False), Caution)
    finding = check_rendering(has_gpu=True)
    assert isinstance(finding, Caution)
    assert "although there is a GPU" in finding
    assert repair in finding


def test_a_driver_that_hangs_or_crashes_is_advice(monkeypatch):
    monkeypatch.setattr(checks, "ask", answering(NoAnswer("the process ended with SIGSEGV")))
    with pytest.raises(BadInput, match=r"no frame can be rendered \(.*SIGSEGV\); run: apt-get install libegl1"):
        check_rendering(has_gpu=False)


def test_a_bowl_beside_its_ramekin_means_other_contacts(monkeypatch):
    monkeypatch.setattr(checks, "ask", answering(0.0145))  # mujoco 3.3.0
    assert "settles in its ramekin" in check_physics()
    monkeypatch.setattr(checks, "ask", answering(0.0372))  # mujoco 3.4.0
    with pytest.raises(BadInput, match=r"slid off its ramekin \(37 mm.*run: pip install mujoco==3\.3\.0"):
        check_physics()
    monkeypatch.setattr(checks, "ask", answering(NoAnswer("ImportError: robosuite")))
    with pytest.raises(BadInput, match=r"cannot be reset \(ImportError: robosuite\); run: pip install"):
        check_physics()


# memory and disk


def test_simulators_that_do_not_fit_are_a_caution(monkeypatch):
    monkeypatch.setattr(checks, "available_memory", lambda: 5 * GIB)
    assert not isinstance(check_host_memory(6), Caution)
    assert isinstance(check_host_memory(7), Caution)
    assert "lower --num-envs" in check_host_memory(7)
    monkeypatch.setattr(checks, "available_memory", lambda: None)
    assert "unknown" in check_host_memory(1000)


def test_available_memory_is_the_kernels_word(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24000000 kB\nMemAvailable:   12345678 kB\n")
    assert checks.available_memory(meminfo) == 12345678 * 1024
    assert checks.available_memory(tmp_path / "missing") is None
    assert checks.available_memory() > 0


def test_a_disk_that_is_too_small_is_found_before_the_run(monkeypatch, tmp_path):
    policy = FakePolicy()
    run = RunConfig(output=str(tmp_path / "not" / "yet" / "there"), keep_checkpoints=3)
    numbers = sum(p.numel() for _, p in policy.named_trainable_parameters())
    needed = 5 * 12 * numbers + GIB // 2  # three kept, the best, one being written: float32 and two moments each
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed, folder=folder))
    assert "5 checkpoints" in check_disk(run, policy)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    with pytest.raises(BadInput, match=r"another disk with --output, or lower --keep-checkpoints"):
        check_disk(run, policy)
    assert "free" in check_disk(run, None)


def test_the_memory_check_runs_one_micro_batch_and_leaves_no_gradient():
    policy = FakePolicy()
    assert (
        check_memory(policy, seen(), 4, num_envs=1) == "a backward pass of 4 decisions reaches 2 of 2 trainable tensors"
    )
    assert policy.rows_run == 4
    assert all(p.grad is None for _, p in policy.named_trainable_parameters())


def test_out_of_memory_names_the_flags_that_help(monkeypatch):
    def too_much(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")

    policy = FakePolicy()
    monkeypatch.setattr(policy, "chunk_logits", too_much)
    with pytest.raises(BadInput) as caught:
        check_memory(policy, seen(), 4, num_envs=1)
    assert "Tried to allocate 2 GiB" in str(caught.value)
    assert "--micro-batch-size" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_peak_and_unused_memory_are_told_and_simulators_that_will_not_fit(gpu):
    policy = FakePolicy()
    policy.device = GPU
    finding = check_memory(policy, seen(), 1, num_envs=16)
    assert "peaks at 20.0 GiB, 2.0 of 24.0 GiB are unused" in finding
    assert not isinstance(finding, Caution)
    finding = check_memory(policy, seen(), 1, num_envs=17)
    assert isinstance(finding, Caution)
    assert "lower --num-envs, or set --memory-budget" in finding


def test_adapters_that_no_gradient_reaches_are_found(monkeypatch):
    policy = FakePolicy()
    monkeypatch.setattr(policy, "chunk_logits", lambda _: torch.zeros(1, requires_grad=True))
    with pytest.raises(SelfCheckError, match=r"no gradient reaches the adapters.*run: pip install"):
        check_memory(policy, seen(), 1, num_envs=1)


# wandb


@pytest.mark.parametrize(
    ("mode", "variables", "finding", "is_caution"),
    [
        ("disabled", {}, "disabled", False),
        ("auto", {}, "offline: there is no login (wandb login)", False),
        ("offline", {}, "offline", False),
        ("auto", {"WANDB_API_KEY": "key"}, "online", False),
        ("online", {}, "run: wandb login", True),
        ("auto", {"WANDB_MODE": "sometimes"}, "WANDB_MODE=sometimes is no mode of wandb: use --wandb-mode", True),
    ],
)
def test_where_records_go_is_said(monkeypatch, tmp_path, mode, variables, finding, is_caution):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert finding in check_wandb(mode)
    assert isinstance(check_wandb(mode), Caution) is is_caution


def test_a_missing_wandb_costs_nothing(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    assert "run: pip install wandb" in check_wandb("offline")
    assert isinstance(check_wandb("offline"), Caution)


# checkpoint


def test_a_checkpoint_is_described_by_its_kind_and_what_it_reads(info, tmp_path):
    assert describe_checkpoint(info).startswith("L1 regression; reads 2 images, the middle 90 % of each, proprio; ")
    folder = make_small_checkpoint(tmp_path / "tokens", num_images=1, proprio=False)
    assert describe_checkpoint(inspect_checkpoint(folder)).startswith("action tokens; reads 1 image, ")
    assert "no proprio" in describe_checkpoint(inspect_checkpoint(folder))


def test_the_ranges_in_force_are_told(info):
    finding = check_statistics(info, "libero_goal", None)
    action = info.statistics["libero_goal_no_noops"].action
    assert finding.startswith("libero_goal_no_noops: actions from [")
    assert f"[{action.q01[0]:.2f} " in finding
    assert f" {action.q99[-1]:.2f}]" in finding
    assert not isinstance(finding, Caution)


def test_statistics_of_another_suite_are_a_caution_if_asked_for_and_else_refused(info):
    finding = check_statistics(info, "libero_goal", "libero_object_no_noops")
    assert isinstance(finding, Caution)
    assert "not those of libero_goal: leave out --unnorm-key" in finding
    bridge = replace(info, statistics={"bridge_orig": info.statistics["libero_goal_no_noops"]})
    assert isinstance(check_statistics(bridge, "libero_goal", None), Caution)
    with pytest.raises(BadInput, match=r"no statistics for libero_90; it has: .*--unnorm-key"):
        check_statistics(info, "libero_90", None)


@pytest.mark.parametrize(
    ("name", "suite", "is_caution"),
    [
        ("Openvla-oft-SFT-libero10-traj1", "libero_10", False),
        ("Openvla-oft-SFT-libero10-traj1", "libero_spatial", True),
        ("openvla-7b-oft-finetuned-libero-spatial-object-goal-10", "libero_goal", False),
        ("my-policy", "libero_goal", False),
    ],
)
def test_a_checkpoint_of_another_suite_is_a_caution(name, suite, is_caution):
    finding = check_suite(name, suite)
    assert isinstance(finding, Caution) is is_caution
    assert ("use --task-suite libero_10" in finding) is is_caution


def test_looks_that_the_checkpoint_may_never_have_seen_are_a_caution(info, tmp_path, monkeypatch):
    monkeypatch.delenv("LIBERO_ASSETS", raising=False)
    finding = check_looks(info, "lowpoly")
    assert isinstance(finding, Caution)
    assert "needs --assets official" in finding
    ours = replace(info, folder=tmp_path)
    (tmp_path / "sft_run.json").write_text("{}")
    assert not isinstance(check_looks(ours, "lowpoly"), Caution)
    with pytest.raises(BadInput, match="is no LIBERO asset folder"):
        check_looks(info, str(tmp_path))
    for name in SUBFOLDERS:
        (tmp_path / name).mkdir()
    assert check_looks(info, str(tmp_path)) == f"folder {tmp_path}"
    monkeypatch.setenv("LIBERO_ASSETS", str(tmp_path))
    assert not isinstance(check_looks(info, "lowpoly"), Caution)


# tasks and frames


@pytest.mark.parametrize(("available", "fits"), [(50, True), (51, True), (49, False), (10, False)])
def test_a_task_needs_all_initial_states_that_are_configured(available, fits):
    tasks = [TASK, replace(TASK, task_id=3, num_init_states=available)]
    if fits:
        assert check_init_states(TaskConfig(), tasks) == "training uses 0 to 39, evaluation 40 to 49, of 2 task(s)"
        return
    with pytest.raises(BadInput, match=rf"task 3 .* has {available} .* 50 are needed .*: lower them to {available}"):
        check_init_states(TaskConfig(), tasks)


def test_a_simulator_that_fails_at_once_is_bad_input():
    pool = FakePool(lambda *_: Script(8, faults=1), num_slots=1)
    with pytest.raises(BadInput, match=r"failed at its first reset \(task 0\): planted fault; .*pip install"):
        first_observation(pool, 0, 0)
    assert first_observation(FakePool(lambda *_: Script(8), num_slots=1), 0, 0) is not None


def test_an_empty_frame_is_found_even_if_one_camera_works():
    assert check_frame(seen()).startswith("2 cameras, 8 x 8 pixels, contrast ")
    dark = seen()
    dark.images[1] = 30
    with pytest.raises(BadInput, match=r"rendered frame is empty .*MUJOCO_GL=osmesa"):
        check_frame(dark)


def test_copies_between_devices_that_do_not_arrive_are_found():
    policy = SimpleNamespace(devices=("first", "second"), replicas=SimpleNamespace(are_equal=lambda: True))
    assert check_replicas(policy) == "2 devices have the same trainable parameters"
    policy.replicas.are_equal = lambda: False
    with pytest.raises(BadInput, match=r"do not arrive: .* leave out --data-parallel"):
        check_replicas(policy)
