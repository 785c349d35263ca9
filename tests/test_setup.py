"""What a run is set up with: looks, teacher, tasks, simulators' first observation, weights."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.config import TrainConfig, changed
from configs.sections import ModelConfig, SimulatorConfig, TaskConfig
from contracts import BadInput
from envs.assets import Pack
from experiment import policies
from experiment.policies import choose_and_keep_teacher, choose_looks, load_policy, weights_fingerprint
from experiment.setup import find_tasks, first_observation, resolve_names
from tests.fakes import FakePool, Script
from tests.small_checkpoint import make_small_checkpoint

SUITE = "libero_spatial"


def on_cpu(checkpoint) -> ModelConfig:
    return ModelConfig(checkpoint=str(checkpoint), device="cpu")


# looks


@pytest.mark.parametrize(
    ("device", "official_is_installed", "trained_on", "looks"),
    [
        ("cuda", True, (), "official"),
        ("cuda", True, ("lowpoly", "official"), "official"),
        ("cuda", True, ("lowpoly",), "lowpoly"),
        ("cuda", False, (), "lowpoly"),
        ("cpu", True, (), "lowpoly"),
    ],
)
def test_a_small_policy_sees_official_looks_only_where_they_are_fast_known_and_there(
    monkeypatch, small, device, official_is_installed, trained_on, looks
):
    monkeypatch.setattr(policies, "choose_device", lambda *_: torch.device(device))
    monkeypatch.setattr(policies, "installed_official", lambda: official_is_installed or None)
    monkeypatch.setattr(policies, "find_checkpoint", lambda _: SimpleNamespace(looks=trained_on))
    monkeypatch.setattr(policies, "find_pack", lambda name: Pack(name, Path()))
    assert choose_looks("auto", ModelConfig(str(small))) == looks


# names


def test_pointers_are_replaced_by_what_they_name_now_and_paths_are_absolute(monkeypatch, tmp_path):
    (tmp_path / "best").write_text("step_8")
    (tmp_path / "step_8").mkdir()
    monkeypatch.chdir(tmp_path)
    pointers = {"checkpoint": "best", "assets": "lowpoly"}
    resolved = resolve_names(changed(TrainConfig(), **pointers))
    assert resolved.model.checkpoint == str(tmp_path / "step_8")
    assert resolve_names(resolved) == resolved
    own_task = resolve_names(changed(TrainConfig(), bddl_file="own.bddl", **pointers)).simulator.bddl_file
    assert own_task == str(tmp_path / "own.bddl")


@pytest.mark.parametrize(("task_ids", "advantage"), [((3,), "batch"), ((1, 4, 8), "gae")])
def test_the_advantage_auto_depends_on_the_number_of_tasks(task_ids, advantage):
    settings = {"checkpoint": "owner/policy", "assets": "lowpoly", "task_ids": task_ids}
    for configured, resolved in (("auto", advantage), ("absolute", "absolute")):
        config = changed(TrainConfig(), **settings, advantage=configured)
        assert resolve_names(config).loss.advantage == resolved


# teacher


def config_with(checkpoint, teacher: str) -> TrainConfig:
    return changed(TrainConfig(), checkpoint=str(checkpoint), device="cpu", teacher=teacher)


def test_the_teacher_is_the_checkpoints_l1_head_unless_told_otherwise(small, tmp_path):
    without_head = make_small_checkpoint(tmp_path / "without_head")
    for checkpoint, teacher, mode in (
        (small, "auto", "l1"),
        (small, "greedy", "greedy"),
        (without_head, "auto", "greedy"),
    ):
        policy = load_policy(on_cpu(checkpoint), SUITE)
        assert choose_and_keep_teacher(policy, config_with(checkpoint, teacher)).mode == mode
    with pytest.raises(BadInput, match="--teacher l1"):
        choose_and_keep_teacher(load_policy(on_cpu(without_head), SUITE), config_with(without_head, "l1"))


# simulators


def test_a_task_needs_all_initial_states_that_are_configured():
    def tasks_of(**settings):
        return find_tasks(TaskConfig("libero_goal", (7,), **settings), SimulatorConfig())

    assert [task.instruction for task in tasks_of()] == ["turn on the stove"]
    for too_many in (
        {"eval_init_states": (40, 51)},
        {"train_init_states": (20, 51), "eval_init_states": (0, 9)},
    ):
        with pytest.raises(BadInput, match=r"task 7 .* has only 50 initial states"):
            tasks_of(**too_many)


def test_a_simulator_that_fails_at_once_ends_the_start():
    faulty = FakePool(lambda *_: Script(env_steps=8, success=True, faults=1, fault_after=0))
    with pytest.raises(BadInput, match="planted fault"):
        first_observation(faulty, TaskConfig())


# weights


def test_the_fingerprint_changes_with_any_number_that_decides(small):
    policy = load_policy(on_cpu(small), SUITE)
    fingerprints = [weights_fingerprint(policy)]
    assert weights_fingerprint(load_policy(on_cpu(small), SUITE)) == fingerprints[0]
    trained = policy.named_trainable_parameters()[-1][1]
    for tensor in (trained, policy.action_head.model.fc2.bias):
        tensor.data.view(-1)[-1] += 1
        fingerprints.append(weights_fingerprint(policy))
    policy.statistics.action.q99[0] += 1
    assert len({*fingerprints, weights_fingerprint(policy)}) == 4
