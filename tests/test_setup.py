"""What a run is set up with: looks, teacher, tasks and first observation."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import experiment.setup
from configs.config import TrainConfig, changed
from configs.sections import ModelConfig, PhaseConfig, SimulatorConfig, TaskConfig
from contracts import BadInput
from envs.assets import installed_official
from experiment.checkpoints import TrainerState
from experiment.setup import (
    choose_looks,
    find_tasks,
    load_policy,
    load_teacher,
    looks_of_small_policy,
    settle_settings,
    weights_fingerprint,
)
from tests.small_checkpoint import make_small_checkpoint

SUITE = "libero_spatial"


def on_cpu(checkpoint) -> ModelConfig:
    return ModelConfig(checkpoint=str(checkpoint), device="cpu")


# looks


@pytest.mark.parametrize(
    ("has_gpu", "official_is_installed", "trained_on", "looks"),
    [
        (True, True, (), "official"),
        (True, True, ("lowpoly", "official"), "official"),
        (True, True, ("lowpoly",), "lowpoly"),
        (True, False, (), "lowpoly"),
        (False, True, (), "lowpoly"),
    ],
)
def test_a_small_policy_sees_official_looks_only_where_they_are_fast_known_and_there(
    has_gpu, official_is_installed, trained_on, looks
):
    assert looks_of_small_policy(has_gpu, official_is_installed, trained_on) == looks


def test_auto_depends_on_the_size_of_the_policy_and_other_names_are_kept(small):
    assert choose_looks("auto", on_cpu(small)) == "lowpoly"
    assert choose_looks("lowpoly", ModelConfig("owner/openvla-7b")) == "lowpoly"
    with pytest.raises(BadInput, match="nowhere"):
        choose_looks("nowhere", on_cpu(small))


@pytest.mark.skipif(installed_official() is None, reason="LIBERO's own assets are not installed")
def test_a_large_policy_sees_official_looks_on_a_cpu_too():
    assert choose_looks("auto", ModelConfig("owner/openvla-7b", device="cpu")) == "official"


def test_pointers_to_a_checkpoint_are_replaced_by_what_they_name_now(tmp_path):
    (tmp_path / "best").write_text("step_8")
    pointers = {"checkpoint": str(tmp_path / "best"), "teacher": str(tmp_path / "best"), "assets": "lowpoly"}
    settled = settle_settings(changed(TrainConfig(), **pointers))
    assert settled.model.checkpoint == settled.phases.teacher == str(tmp_path / "step_8")
    assert settle_settings(settled) == settled


@pytest.mark.parametrize(("task_ids", "advantage"), [((3,), "batch"), ((1, 4, 8), "gae")])
def test_the_advantage_auto_depends_on_the_number_of_tasks(task_ids, advantage):
    settings = {"checkpoint": "owner/policy", "assets": "lowpoly", "task_ids": task_ids}
    settled = settle_settings(changed(TrainConfig(), **settings, advantage="auto"))
    assert settled.loss.advantage == advantage
    settled = settle_settings(changed(TrainConfig(), **settings, advantage="absolute"))
    assert settled.loss.advantage == "absolute"


# teacher


def test_what_is_wrong_with_another_teacher_is_said_with_its_flag(small, tmp_path):
    policy = load_policy(on_cpu(small), SUITE)
    one_image = make_small_checkpoint(tmp_path / "teacher", num_images=1)
    for teacher in (str(one_image), "gredy"):
        with pytest.raises(BadInput, match=f"--teacher {teacher}: "):
            load_teacher(policy, on_cpu(small), PhaseConfig(teacher=teacher), SUITE, kl_coef=0.0)


def test_the_teacher_is_the_checkpoints_l1_head_unless_another_is_named(small, tmp_path):
    without_head = make_small_checkpoint(tmp_path / "without_head")
    for checkpoint, teacher, mode in (
        (small, "auto", "l1"),
        (small, "greedy", "greedy"),
        (without_head, "auto", "greedy"),
        (small, str(without_head), "greedy"),
    ):
        policy = load_policy(on_cpu(checkpoint), SUITE)
        phases = PhaseConfig(teacher=teacher)
        assert load_teacher(policy, on_cpu(checkpoint), phases, SUITE, kl_coef=0.0).mode == mode


# simulators


def test_a_task_needs_all_initial_states_that_are_configured():
    def tasks_of(**settings):
        task = TaskConfig("libero_goal", (7,), **settings)
        return find_tasks(task, SimulatorConfig())

    assert [task.instruction for task in tasks_of()] == ["turn on the stove"]
    assert len(tasks_of(train_init_states="fresh", eval_init_states=(0, 50))) == 1
    for too_many in (
        {"eval_init_states": (40, 51)},
        {"train_init_states": (20, 51), "eval_init_states": (0, 9)},
    ):
        with pytest.raises(BadInput, match=r"task 7 .* has only 50 initial states"):
            tasks_of(**too_many)


# the run folder


@pytest.mark.parametrize("resume", [None, "runs/trial"])
def test_the_id_of_the_wandb_run_is_remembered_by_a_resumed_run_too(monkeypatch, resume):
    run = SimpleNamespace(wandb=SimpleNamespace(id="new"))
    monkeypatch.setattr(experiment.setup, "start_run", lambda *_: run)
    monkeypatch.setattr(experiment.setup, "reopen_run", lambda *_: run)
    monkeypatch.setattr(experiment.setup, "commit_of", lambda *_: None)
    policy = SimpleNamespace(info=SimpleNamespace(weights_folder=None))
    learner = SimpleNamespace(policy=policy, ranks=None)
    setup = SimpleNamespace(state=TrainerState(), learner=learner, config=None)
    experiment.setup.open_run(setup, resume, [])
    assert setup.state.wandb_id == "new"


# weights


def test_torch_keeps_compiled_code_in_our_cache_and_not_where_temporary_files_are(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path), "VLA_GRPO_CACHE": str(tmp_path / "cache")}
    environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    # It ends after torch was imported, because there is no such checkpoint.
    command = [
        sys.executable,
        "train_grpo.py",
        "--checkpoint",
        str(tmp_path / "none"),
        "--output",
        str(tmp_path),
    ]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], env=environ, capture_output=True)
    assert ended.returncode == 2
    assert not list(tmp_path.glob("torchinductor*"))


def test_the_fingerprint_changes_with_any_trained_number(small):
    policy = load_policy(on_cpu(small), SUITE)
    before = weights_fingerprint(policy)
    assert weights_fingerprint(load_policy(on_cpu(small), SUITE)) == before
    _, last = policy.named_trainable_parameters()[-1]
    last.data.view(-1)[-1] += 1
    assert weights_fingerprint(policy) != before


def test_statistics_of_another_number_of_actions_than_the_simulator_takes_are_refused(small, tmp_path):
    folder = shutil.copytree(small, tmp_path / "checkpoint")
    path = folder / "dataset_statistics.json"
    statistics = json.loads(path.read_text())
    action = statistics["libero_spatial_no_noops"]["action"]
    statistics["libero_spatial_no_noops"]["action"] = {name: values[:6] for name, values in action.items()}
    path.write_text(json.dumps(statistics))
    with pytest.raises(BadInput, match="6 numbers"):
        load_policy(on_cpu(folder), SUITE)
