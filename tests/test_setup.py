"""What a run is set up with: looks, names, the first observation of a simulator, the weights' fingerprint."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.config import TrainConfig, changed
from configs.sections import ModelConfig, TaskConfig
from contracts import BadInput, read_json, write_json
from envs.assets import Pack
from experiment import policies
from experiment.policies import choose_looks, load_policy, weights_fingerprint
from experiment.setup import first_observation, resolve_names
from tests.fakes import FakePool, Script

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
    monkeypatch.setattr(policies, "read_network_config", lambda _: SimpleNamespace(looks=trained_on))
    monkeypatch.setattr(policies, "find_pack", lambda name: Pack(name, Path()))
    assert choose_looks("auto", ModelConfig(str(small))) == looks


# names


def test_an_adapter_of_a_7b_that_was_trained_on_low_poly_pictures_sees_these(monkeypatch, small, tmp_path):
    load_policy(on_cpu(small), SUITE).save_adapter(tmp_path / "adapter", looks="lowpoly")
    monkeypatch.setattr(policies, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(policies, "is_large", lambda _: True)
    monkeypatch.setattr(policies, "find_pack", lambda name: Pack(name, Path()))
    assert choose_looks("auto", ModelConfig(str(tmp_path / "adapter"))) == "lowpoly"
    assert choose_looks("auto", ModelConfig(str(small))) == "official"


def test_a_run_decides_what_its_policy_is_shown_and_not_what_its_base_knows_too(monkeypatch, small, tmp_path):
    monkeypatch.setattr(policies, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(policies, "installed_official", lambda: True)
    monkeypatch.setattr(policies, "find_pack", lambda name: Pack(name, Path()))
    base = shutil.copytree(small, tmp_path / "base")
    config = base / "config.json"
    write_json(config, read_json(config) | {"looks": ["lowpoly", "official"]})
    policy = load_policy(on_cpu(base), SUITE)
    for looks, shown in (("lowpoly", "lowpoly"), ("official", "official"), ("", "official")):
        policy.save_adapter(tmp_path / "adapter", looks)
        assert choose_looks("auto", ModelConfig(str(tmp_path / "adapter"))) == shown


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


# simulators


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
    for tensor in (trained, policy.l1_head.model.fc2.bias):
        tensor.data.view(-1)[-1] += 1
        fingerprints.append(weights_fingerprint(policy))
    policy.statistics.action.q99[0] += 1
    assert len({*fingerprints, weights_fingerprint(policy)}) == 4
