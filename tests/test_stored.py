"""config.json gives back the configuration that was written, also one of an older version, or refuses it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.config import TrainConfig, changed, differing_fields
from configs.presets import PRESETS
from configs.stored import from_dict, to_dict
from contracts import BadInput

DEFAULT = TrainConfig()

configurations = st.builds(
    changed,
    st.just(DEFAULT),
    task_ids=st.lists(st.integers(0, 9), min_size=1, unique=True).map(tuple),
    max_env_steps=st.none() | st.integers(1, 500),
    bddl_file=st.none() | st.text(),
    lr=st.floats(1e-12, 1),
    micro_batch_size=st.just("auto") | st.integers(1, 2**63 - 1),
    group_success_bounds=st.tuples(st.floats(0, 0.5), st.floats(0.5, 1)),
    warmup=st.booleans(),
    train_init_states=st.just("fresh") | st.just((0, 30)),
    eval_init_states=st.just((30, 50)),
)


def as_json_holds_it(config: TrainConfig) -> dict:
    return json.loads(json.dumps(to_dict(config)))


@given(configurations | st.sampled_from(list(PRESETS.values())))
def test_a_trip_through_json_changes_nothing(config):
    read = from_dict(as_json_holds_it(config), "RUN/config.json")
    assert read == config
    assert differing_fields(config, read) == {}


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("update", "lr", None),
        ("update", "batch_size", 0),
        ("phases", "warmup_actor", "expert"),
        ("loss", "invented", 1),
    ],
)
def test_a_stored_configuration_with_other_values_or_fields_is_refused(section, name, value):
    stored = as_json_holds_it(DEFAULT)
    stored[section][name] = value
    with pytest.raises(BadInput, match=rf"^RUN/config\.json: .*{name.replace('_', '.')}"):
        from_dict(stored, "RUN/config.json")


def test_no_default_replaces_what_a_stored_configuration_lacks():
    stored = as_json_holds_it(DEFAULT)
    del stored["update"]["lr"]
    with pytest.raises(BadInput, match=r"update\.lr is missing"):
        from_dict(stored, "RUN/config.json")


@pytest.mark.parametrize(
    ("settings", "setting", "accepted", "refused"),
    [
        ({}, "phases.importance", "student", "behaviour"),
        ({}, "phases.distill_target", "greedy", "sharpened"),
        ({}, "phases.distill_temperature", 0.5, 0.7),
        ({}, "loss.dual_clip", 3.0, 1000.0),
        ({}, "update.lora_alpha", 16, 32),
        ({"lora_rank": 8}, "update.lora_alpha", 8, 16),
        ({}, "run.wandb_project", "vla-grpo", "mine"),
        ({"n_steps": 300, "group_size": 2, "dynamic_sampling": True}, "rollout.max_extra_steps", 300, 2048),
    ],
)
def test_a_withdrawn_setting_of_an_older_run_is_dropped_unless_it_changed_the_algorithm(
    settings, setting, accepted, refused, monkeypatch
):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    config = changed(DEFAULT, **settings)
    section, name = setting.split(".")
    stored = as_json_holds_it(config)
    stored[section][name] = accepted
    assert from_dict(stored, "RUN/config.json") == config
    stored[section][name] = refused
    with pytest.raises(BadInput, match=rf"^RUN/config\.json: {setting}"):
        from_dict(stored, "RUN/config.json")


def test_without_dynamic_sampling_the_limit_of_extra_steps_did_nothing():
    stored = as_json_holds_it(DEFAULT)
    stored["rollout"]["max_extra_steps"] = 77
    assert from_dict(stored, "RUN/config.json") == DEFAULT


def test_another_wandb_project_is_named_by_the_environment(monkeypatch):
    stored = as_json_holds_it(DEFAULT)
    stored["run"]["wandb_project"] = "mine"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert from_dict(stored, "RUN/config.json") == DEFAULT
