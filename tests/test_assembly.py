"""From a configuration to a policy, a teacher and a simulator's recipe: every choice, and every refusal in one line."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

import assembly
from assembly import (
    LARGE_CHECKPOINT_BYTES,
    choose_device,
    choose_devices,
    choose_dtype,
    choose_teacher,
    env_spec,
    fit_to_memory,
    load_policy,
)
from configs.config import LossConfig, PhaseConfig, PolicyConfig, TaskConfig, TrainConfig, UpdateConfig
from errors import BadInput
from rl.ranks import Ranks
from vla.memory import MemoryPlan


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def small_checkpoint(folder):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"0" * 1000)
    return str(folder)


# device and precision


@pytest.mark.parametrize(("wanted", "device"), [("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_with_a_gpu_the_flag_decides_and_auto_is_cuda(a_gpu, wanted, device):
    assert choose_device(PolicyConfig(checkpoint="some/hub-id", device=wanted)).type == device


def test_without_a_gpu_a_small_checkpoint_runs_on_the_cpu(no_gpu, tmp_path):
    assert choose_device(PolicyConfig(checkpoint=small_checkpoint(tmp_path / "tiny"))).type == "cpu"


def test_a_small_checkpoint_below_the_home_folder_runs_on_the_cpu(no_gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    small_checkpoint(tmp_path / "models" / "tiny")
    assert choose_device(PolicyConfig(checkpoint="~/models/tiny")).type == "cpu"


def test_without_a_gpu_7b_is_refused_unless_forced(no_gpu, tmp_path):
    large = tmp_path / "large"
    large.mkdir()
    with (large / "model.safetensors").open("wb") as weights:
        weights.truncate(LARGE_CHECKPOINT_BYTES + 1)  # sparse: takes no disk
    for checkpoint in (str(large), "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"):
        with pytest.raises(BadInput, match=r"needs a CUDA GPU of 24 GB.*--device cpu"):
            choose_device(PolicyConfig(checkpoint=checkpoint))
        assert choose_device(PolicyConfig(checkpoint=checkpoint, device="cpu")).type == "cpu"


def test_cuda_without_a_gpu_is_refused(no_gpu):
    with pytest.raises(BadInput, match="--device cuda: no CUDA GPU is visible"):
        choose_device(PolicyConfig(checkpoint="x", device="cuda"))


def test_data_parallel_takes_every_visible_gpu(a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    wanted = PolicyConfig(checkpoint="X", data_parallel=True)
    assert choose_devices(wanted) == [torch.device("cuda", index) for index in range(3)]
    assert choose_devices(replace(wanted, data_parallel=False)) == [torch.device("cuda", 0)]


def test_data_parallel_on_one_device_goes_on_with_it_and_says_so(a_gpu, caplog):
    for device, named in (("cuda", "cuda:0"), ("cpu", "cpu")):
        assert choose_devices(PolicyConfig(checkpoint="X", device=device, data_parallel=True)) == [torch.device(named)]
        assert f"there is one device ({named})" in caplog.text


def test_a_suite_without_public_checkpoint_asks_for_one(a_gpu):
    with pytest.raises(BadInput, match="--checkpoint"):
        choose_device(PolicyConfig(checkpoint=None))


@pytest.mark.parametrize(
    ("wanted", "device", "dtype"),
    [
        ("auto", "cuda", torch.bfloat16),
        ("auto", "cpu", torch.float32),
        ("float32", "cuda", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_precision(wanted, device, dtype):
    assert choose_dtype(PolicyConfig(dtype=wanted), torch.device(device)) is dtype


# teacher


def config_with(teacher="auto", **changes) -> TrainConfig:
    return replace(TrainConfig(policy=PolicyConfig(checkpoint="X", teacher=teacher)), **changes)


@pytest.mark.parametrize(
    ("wanted", "has_head", "mode"),
    [("auto", True, "l1"), ("auto", False, "greedy"), ("greedy", True, "greedy"), ("greedy", False, "greedy"),
     ("l1", True, "l1")],
)  # fmt: skip
def test_the_teacher_is_the_l1_head_where_there_is_one_and_nobody_objects(wanted, has_head, mode):
    teacher = choose_teacher(config_with(wanted), has_head)
    assert teacher.mode == mode
    assert len(teacher.why) > 10


def test_an_l1_teacher_needs_a_head():
    with pytest.raises(BadInput, match="--teacher l1: X ships no action head"):
        choose_teacher(config_with("l1"), has_l1_head=False)


@pytest.mark.parametrize(
    "changes", [{"phases": PhaseConfig(distill_target="sharpened")}, {"loss": LossConfig(kl_coef=0.1)}]
)
def test_an_l1_teacher_has_no_token_distribution(changes):
    with pytest.raises(BadInput, match="--teacher greedy"):
        choose_teacher(config_with(**changes), has_l1_head=True)
    assert choose_teacher(config_with("greedy", **changes), has_l1_head=True).mode == "greedy"


# policy and simulator


def test_every_policy_setting_reaches_the_policy(monkeypatch, no_gpu):
    received = {}
    monkeypatch.setattr(
        assembly.Policy, "load", lambda checkpoint, **given: received.update(given, checkpoint=checkpoint)
    )
    settings = PolicyConfig("X", "key", "cpu", "bfloat16", True, lora_rank=3, lora_alpha=5, temperature=1.6)
    config = TrainConfig(policy=settings, task=TaskConfig(task_suite="libero_goal"))
    load_policy(replace(config, run=replace(config.run, seed=9)))
    assert received == {
        "checkpoint": "X", "unnorm_key": "key", "device": torch.device("cpu"), "dtype": torch.bfloat16, "lora_rank": 3,
        "lora_alpha": 5, "compile_network": None, "task_suite": "libero_goal", "seed": 9, "load_in_4bit": True,
    }  # fmt: skip
    used_elsewhere = {"temperature", "teacher", "data_parallel", "compile", "gradient_checkpointing", "memory_budget"}
    assert {f.name for f in fields(PolicyConfig)} == (set(received) | used_elsewhere) - {
        "task_suite", "seed", "compile_network",
    }  # fmt: skip


def test_without_the_flag_the_checkpoint_decides_about_4_bits(monkeypatch, no_gpu):
    received = {}
    monkeypatch.setattr(assembly.Policy, "load", lambda _, **given: received.update(given))
    load_policy(TrainConfig(policy=PolicyConfig("X", device="cpu")))
    assert received["load_in_4bit"] is None


def test_a_base_in_4_bits_is_not_spread_over_processes(no_gpu):
    config = TrainConfig(policy=PolicyConfig("X", device="cpu", load_in_4bit=True))
    with pytest.raises(BadInput, match=r"^a base in 4 bits cannot be spread over processes: .*--load-in-4bit"):
        load_policy(config, Ranks(size=2, shard_base=True))


def test_the_recipe_has_the_configured_tasks_and_the_policys_cameras(monkeypatch):
    monkeypatch.delenv("LIBERO_ASSETS", raising=False)
    task = TaskConfig(task_suite="libero_goal", task_ids=(2, 5), max_env_steps=77)
    spec = env_spec(task, num_images=1)
    assert (spec.task_suite, spec.task_ids, spec.num_images) == ("libero_goal", (2, 5), 1)
    assert (spec.max_env_steps, spec.bddl_file, spec.assets) == (77, None, "lowpoly")


def test_an_unknown_task_is_refused():
    with pytest.raises(BadInput, match="unknown task id 99"):
        env_spec(TaskConfig(task_ids=(0, 99)), 1)


def test_a_gpu_too_small_for_the_weights_is_one_line(no_gpu, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")

    monkeypatch.setattr(assembly, "load_data_parallel", full)
    with pytest.raises(BadInput, match=r"^out of GPU memory while loading x \(CUDA .* 2 GiB\.\): close other [^\n]*$"):
        assembly.load_policy(TrainConfig(policy=PolicyConfig(checkpoint="x", device="cpu")))


# memory


@pytest.mark.parametrize(
    ("batch_size", "ranks", "devices", "size"), [(2, 1, 1, 2), (4, 2, 1, 2), (4, 1, 2, 2), (5, 2, 1, 3), (1, 8, 1, 1)]
)
def test_the_micro_batch_is_chosen_for_what_one_device_gets_of_a_minibatch(
    batch_size, ranks, devices, size, monkeypatch
):
    """More would take memory for decisions that never come, and recompute what would have fitted."""
    asked = []
    monkeypatch.setattr(assembly, "measure_needs", lambda *_: [])
    monkeypatch.setattr(assembly, "synthetic_observations", lambda *_: [None])
    monkeypatch.setattr(assembly, "free_for_activations", lambda *_, **__: 0.0)
    monkeypatch.setattr(assembly, "choose_plan", lambda *a: asked.append(a[-1]) or MemoryPlan(a[-1], 0))
    for kind in ("cuda", "cpu"):
        device = torch.device(kind)
        policy = SimpleNamespace(
            device=device, devices=[device] * devices, network=SimpleNamespace(num_blocks=81), recompute=lambda _: None
        )
        config = TrainConfig(update=UpdateConfig(batch_size=batch_size))
        assert fit_to_memory(config, policy, Ranks(size=ranks)).update.micro_batch == size
    assert asked == [size]
