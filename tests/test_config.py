"""Configurations are checked values: contradictions are refused in one line, storage is lossless."""

import json
from collections import Counter
from copy import deepcopy
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.config import SECTIONS, TrainConfig, differing_fields, from_dict, to_dict
from errors import BadInput

DEFAULT = TrainConfig()


def changed(**sections) -> TrainConfig:
    """The default configuration with fields of some sections replaced."""
    return replace(DEFAULT, **{name: replace(getattr(DEFAULT, name), **values) for name, values in sections.items()})


# (changes, the flag that the message has to name)
CONTRADICTIONS = [
    ({"task": {"task_ids": ()}}, "--task-ids"),
    ({"task": {"task_ids": (1, 2, 1)}}, "--task-ids"),
    ({"task": {"num_envs": 0}}, "--num-envs"),
    ({"task": {"max_env_steps": 0}}, "--max-env-steps"),
    ({"task": {"train_init_states": (5, 5)}}, "--train-init-states"),
    ({"task": {"train_init_states": (-1, 5)}}, "--train-init-states"),
    ({"task": {"eval_init_states": (50, 40)}}, "--eval-init-states"),
    ({"task": {"train_init_states": (0, 41)}}, "--train-init-states"),
    ({"task": {"eval_init_states": (39, 45)}}, "--eval-init-states"),
    ({"policy": {"lora_rank": 0}}, "--lora-rank"),
    ({"policy": {"lora_alpha": 0}}, "--lora-alpha"),
    ({"policy": {"temperature": 0.0}}, "--temperature"),
    ({"policy": {"temperature": float("nan")}}, "--temperature"),
    ({"phases": {"warmup_steps": -1}}, "--warmup-steps"),
    ({"phases": {"transition_steps": -1}}, "--transition-steps"),
    ({"phases": {"total_steps": -1}}, "--total-steps"),
    ({"phases": {"distill_temperature": 0.0}}, "--distill-temperature"),
    ({"phases": {"warmup": False, "warmup_only": True}}, "--warmup-only"),
    ({"rollout": {"n_steps": 0}}, "--n-steps"),
    ({"rollout": {"group_size": 0}}, "--group-size"),
    ({"rollout": {"max_extra_steps": -1}}, "--max-extra-steps"),
    ({"rollout": {"group_success_bounds": (0.9, 0.1)}}, "--group-success-bounds"),
    ({"rollout": {"group_success_bounds": (0.1, 1.5)}}, "--group-success-bounds"),
    ({"rollout": {"dynamic_sampling": True}}, "--group-size"),
    ({"loss": {"discount": 0.0}}, "--discount"),
    ({"loss": {"discount": 1.1}}, "--discount"),
    ({"loss": {"discount": 0.9, "advantage": "group"}, "rollout": {"group_size": 4}}, "--advantage"),
    ({"loss": {"clip_high": 0.0}}, "--clip-high"),
    ({"loss": {"clip_high": 1.0}}, "--clip-high"),
    ({"loss": {"kl_coef": -0.1}}, "--kl-coef"),
    ({"loss": {"entropy_coef": -0.1}}, "--entropy-coef"),
    ({"loss": {"advantage": "group"}}, "--group-size"),
    ({"loss": {"advantage": "rloo"}}, "--group-size"),
    ({"loss": {"ratio_level": "token"}, "phases": {"importance": "behaviour"}}, "--ratio-level"),
    ({"update": {"n_epochs": 0}}, "--n-epochs"),
    ({"update": {"batch_size": 0}}, "--batch-size"),
    ({"update": {"micro_batch_size": 0}}, "--micro-batch-size"),
    ({"update": {"lr": 0.0}}, "--lr"),
    ({"update": {"weight_decay": -0.1}}, "--weight-decay"),
    ({"update": {"max_grad_norm": 0.0}}, "--max-grad-norm"),
    ({"update": {"target_kl": 0.0}}, "--target-kl"),
    ({"evaluation": {"eval_interval": 0}}, "--eval-interval"),
    ({"evaluation": {"eval_trials": 0}}, "--eval-trials"),
    ({"evaluation": {"max_updates_without_signal": 0}}, "--max-updates-without-signal"),
    ({"critic": {"gae_lambda": 1.5}}, "--gae-lambda"),
    ({"critic": {"value_lr": 0.0}}, "--value-lr"),
    ({"critic": {"value_coef": 0.0}}, "--value-coef"),
    ({"critic": {"value_clip": 0.0}}, "--value-clip"),
    ({"critic": {"value_warmup_steps": -1}}, "--value-warmup-steps"),
    ({"curriculum": {"curriculum": True}}, "--task-ids"),
    ({"curriculum": {"curriculum_alpha": 1.0}}, "--curriculum-alpha"),
    ({"curriculum": {"curriculum_temperature": 0.0}}, "--curriculum-temperature"),
    ({"curriculum": {"curriculum_floor": 1.5}}, "--curriculum-floor"),
    ({"run": {"name": ""}}, "--name"),
    ({"run": {"name": "a/b"}}, "--name"),
    ({"run": {"seed": -1}}, "--seed"),
    ({"run": {"keep_checkpoints": 0}}, "--keep-checkpoints"),
]


@pytest.mark.parametrize(("changes", "flag"), CONTRADICTIONS)
def test_contradictions_are_refused_in_one_line_that_names_the_flag(changes, flag):
    with pytest.raises(BadInput) as caught:
        changed(**changes)
    assert flag in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"phases": {"warmup_steps": 0, "transition_steps": 0, "total_steps": 0}},
        {"task": {"eval_init_states": (0, 50)}},  # the published protocol
        {"task": {"train_init_states": (40, 50), "eval_init_states": (0, 40)}},
        {"loss": {"advantage": "group"}, "rollout": {"group_size": 2, "dynamic_sampling": True}},
        {"loss": {"discount": 0.99}},
        {"phases": {"importance": "behaviour"}},
        {"rollout": {"group_success_bounds": (0.0, 1.0)}},
    ],
)
def test_what_is_no_contradiction_is_accepted(changes):
    changed(**changes)


def test_defaults_are_those_of_the_specification():
    assert (DEFAULT.phases.warmup_steps, DEFAULT.phases.transition_steps, DEFAULT.phases.total_steps) == (
        25_000, 5_000, 100_000
    )  # fmt: skip
    assert (DEFAULT.rollout.n_steps, DEFAULT.update.n_epochs, DEFAULT.update.batch_size) == (512, 10, 2)
    assert (DEFAULT.update.lr, DEFAULT.update.weight_decay) == (1e-6, 0.01)
    assert (DEFAULT.update.max_grad_norm, DEFAULT.update.target_kl) == (1.0, None)
    assert (DEFAULT.loss.clip_high, DEFAULT.loss.kl_coef, DEFAULT.loss.entropy_coef) == (0.28, 0.0, 0.0)
    assert (DEFAULT.loss.advantage, DEFAULT.loss.ratio_level, DEFAULT.loss.aggregation, DEFAULT.loss.discount) == (
        "absolute", "chunk", "decision", 1.0
    )  # fmt: skip
    assert (DEFAULT.policy.temperature, DEFAULT.policy.lora_rank, DEFAULT.policy.lora_alpha) == (1.0, 16, 16)
    assert (DEFAULT.task.train_init_states, DEFAULT.task.eval_init_states) == ((0, 40), (40, 50))
    assert (DEFAULT.evaluation.eval_interval, DEFAULT.rollout.group_success_bounds) == (5_000, (0.1, 0.9))
    assert (DEFAULT.phases.importance, DEFAULT.phases.distill_target) == ("student", "greedy")


def test_a_configuration_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        DEFAULT.update.lr = 1.0


def test_flags_are_unique_across_sections():
    names = Counter(f.name for section in SECTIONS.values() for f in fields(section))
    assert [name for name, uses in names.items() if uses > 1] == []


configurations = st.builds(
    changed,
    task=st.fixed_dictionaries(
        {"task_ids": st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(tuple)},
        optional={"max_env_steps": st.none() | st.integers(1, 500), "bddl_file": st.none() | st.text()},
    ),
    update=st.fixed_dictionaries({"lr": st.floats(1e-12, 1), "target_kl": st.none() | st.floats(1e-6, 1)}),
    rollout=st.fixed_dictionaries({"group_success_bounds": st.tuples(st.floats(0, 0.5), st.floats(0.5, 1))}),
    phases=st.fixed_dictionaries({"warmup_only": st.booleans()}),
)


@given(configurations)
def test_a_trip_through_json_changes_nothing(config):
    assert from_dict(json.loads(json.dumps(to_dict(config))), "config.json") == config


@given(configurations)
def test_equal_configurations_do_not_differ(config):
    assert differing_fields(config, from_dict(json.loads(json.dumps(to_dict(config))), "x")) == {}


def test_differing_fields_are_named_with_both_values():
    other = changed(update={"lr": 1e-5}, task={"task_ids": (3,)})
    assert differing_fields(DEFAULT, other) == {"task_ids": ((0,), (3,)), "lr": (1e-6, 1e-5)}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_single_field_counts_as_a_difference(section):
    for field in fields(getattr(DEFAULT, section)):
        other = deepcopy(DEFAULT)
        object.__setattr__(getattr(other, section), field.name, "another value")  # past the checks of __post_init__
        assert list(differing_fields(DEFAULT, other)) == [field.name]


def refused(stored: object) -> str:
    with pytest.raises(BadInput) as caught:
        from_dict(stored, "RUN/config.json")
    assert "\n" not in str(caught.value)
    assert "RUN/config.json" in str(caught.value)
    return str(caught.value)


def test_a_stored_configuration_with_other_fields_is_refused():
    stored = to_dict(DEFAULT)
    del stored["update"]["lr"]
    assert "'update'" in refused(stored)
    stored = to_dict(DEFAULT)
    stored["loss"]["invented"] = 1
    assert "invented" in refused(stored)
    stored = to_dict(DEFAULT)
    del stored["phases"]
    assert "'phases'" in refused(stored)
    stored = to_dict(DEFAULT)
    stored["task"] = [1, 2]
    assert "'task'" in refused(stored)


@pytest.mark.parametrize(("field", "value"), [("lr", "fast"), ("n_epochs", None), ("batch_size", [2])])
def test_a_stored_value_of_another_type_is_refused(field, value):
    stored = to_dict(DEFAULT)
    stored["update"][field] = value
    refused(stored)
