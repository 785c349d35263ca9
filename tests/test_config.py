"""Configurations are checked values: contradictions are refused in one line, storage is lossless."""

import json
from collections import Counter
from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.config import EvalConfig, Suite, TrainConfig, changed, differing_fields, from_dict, to_dict
from configs.presets import PRESETS
from contracts import BadInput

DEFAULT = TrainConfig()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task_ids": (1, 2, 1)}, "--task-ids"),
        ({"eval_init_states": (50, 40)}, "--eval-init-states"),
        ({"train_init_states": (0, 41)}, "overlap"),
        ({"warmup_steps": -1}, "--warmup-steps must not be negative"),
        ({"advantage": "gae"}, "add --ratio-level token"),
        ({"advantage": "batch", "ratio_level": "token", "discount": 0.9}, "--discount"),
        ({"curriculum": True}, "--task-ids"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"dynamic_sampling": True}, "--group-size"),
        ({"advantage": "rloo"}, "--group-size"),
        ({"max_hours": float("inf")}, "--max-hours must be a number of at most 64 bits"),
    ],
)
def test_contradictions_are_refused_with_the_flag(settings, said):
    with pytest.raises(BadInput) as caught:
        changed(DEFAULT, **settings)
    assert said in str(caught.value)


def test_flags_are_unique_across_sections():
    names = Counter(f.name for section in vars(DEFAULT).values() for f in fields(section))
    assert [name for name, uses in names.items() if uses > 1] == []


# config.json

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
)


def through_json(config: TrainConfig) -> TrainConfig:
    return from_dict(json.loads(json.dumps(to_dict(config))), "RUN/config.json")


@given(configurations | st.sampled_from(list(PRESETS.values())))
def test_a_trip_through_json_changes_nothing(config):
    assert through_json(config) == config
    assert differing_fields(config, through_json(config)) == {}


@pytest.mark.parametrize("suite", get_args(Suite))
def test_every_suite_has_a_preset_that_differs_from_the_defaults_only_in_what_it_runs_on(suite):
    assert set(differing_fields(DEFAULT, PRESETS[suite])) <= {"task_suite", "checkpoint", "name"}
    assert PRESETS[suite].task.task_suite == suite


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        ("update", "lr", None, "update.lr is None"),
        ("update", "batch_size", 0, "--batch-size must be positive"),
        ("phases", "warmup_actor", "expert", "phases.warmup_actor is 'expert'"),
        ("loss", "invented", 1, "loss.invented is missing, or no setting"),
    ],
)
def test_a_stored_configuration_with_other_values_or_fields_is_refused(section, name, value, said):
    stored = json.loads(json.dumps(to_dict(DEFAULT)))
    stored[section][name] = value
    with pytest.raises(BadInput) as caught:
        from_dict(stored, "RUN/config.json")
    assert str(caught.value).startswith("RUN/config.json: ")
    assert said in str(caught.value)


def test_no_default_replaces_what_a_stored_configuration_lacks():
    stored = to_dict(DEFAULT)
    del stored["update"]["lr"]
    with pytest.raises(BadInput, match=r"update\.lr is missing"):
        from_dict(stored, "RUN/config.json")


# evaluation


def test_all_suites_are_those_of_the_published_tables_and_none_comes_twice():
    published = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    assert EvalConfig(task_suite=("all",)).suites == published
    assert EvalConfig(task_suite=("all", "libero_90", "libero_goal")).suites == (*published, "libero_90")
