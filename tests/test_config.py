"""Configurations are checked values: contradictions are refused in one line, storage is lossless."""

import json
from collections import Counter
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.config import EvalConfig, TrainConfig, differing_fields, from_dict, to_dict
from configs.presets import PRESETS
from contracts import BadInput

DEFAULT = TrainConfig()


def changed(**sections) -> TrainConfig:
    """The default configuration with fields of some sections replaced."""
    return replace(DEFAULT, **{name: replace(getattr(DEFAULT, name), **values) for name, values in sections.items()})


# (changes, the flag that the message has to name)
CONTRADICTIONS = [
    ({"task": {"task_ids": ()}}, "--task-ids"),
    ({"task": {"task_ids": (1, 2, 1)}}, "--task-ids"),
    ({"task": {"train_init_states": (5, 5)}}, "--train-init-states"),
    ({"task": {"train_init_states": (-1, 5)}}, "--train-init-states"),
    ({"task": {"eval_init_states": (50, 40)}}, "--eval-init-states"),
    ({"task": {"train_init_states": (0, 41)}}, "overlap"),
    ({"simulator": {"num_envs": 0}}, "--num-envs must be positive"),
    ({"phases": {"warmup_steps": -1}}, "--warmup-steps must not be negative"),
    ({"phases": {"importance": "behaviour"}, "loss": {"ratio_level": "token"}}, "--ratio-level"),
    ({"rollout": {"temperature": 0.0}}, "--temperature must be positive"),
    ({"rollout": {"temperature": float("nan")}}, "--temperature"),
    ({"rollout": {"group_success_bounds": (0.1, 1.5)}}, "--group-success-bounds"),
    ({"rollout": {"dynamic_sampling": True}}, "--group-size"),
    ({"loss": {"discount": 1.1}}, "--discount"),
    ({"loss": {"clip_high": 1.1}}, "--clip-high"),
    ({"loss": {"advantage": "rloo"}}, "--group-size"),
    ({"critic": {"gae_lambda": 1.5}}, "--gae-lambda"),
    ({"update": {"micro_batch_size": 0}}, "--micro-batch-size"),
    ({"update": {"target_kl": 0.0}}, "--target-kl"),
    ({"run": {"name": "a/b"}}, "--name"),
    ({"run": {"max_hours": float("inf")}}, "--max-hours must be a number of at most 64 bits"),
    ({"run": {"seed": 2**64}}, "--seed must be a number of at most 64 bits"),
]


@pytest.mark.parametrize(("changes", "said"), CONTRADICTIONS)
def test_contradictions_are_refused_in_one_line_that_names_the_flag(changes, said):
    with pytest.raises(BadInput) as caught:
        changed(**changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"phases": {"warmup_steps": 0, "transition_steps": 0, "total_steps": 0}},
        {"task": {"eval_init_states": (0, 50)}},  # the published protocol
        {"loss": {"advantage": "group"}, "rollout": {"group_size": 2, "dynamic_sampling": True}},
        {"phases": {"importance": "behaviour"}},
        {"rollout": {"group_success_bounds": (0.0, 1.0)}},
    ],
)
def test_what_is_no_contradiction_is_accepted(changes):
    changed(**changes)


def test_defaults_are_those_of_the_specification():
    phases, rollout, loss, update = DEFAULT.phases, DEFAULT.rollout, DEFAULT.loss, DEFAULT.update
    assert (phases.warmup_steps, phases.transition_steps, phases.total_steps) == (25_000, 5_000, 100_000)
    assert (phases.importance, phases.distill_target) == ("student", "greedy")
    assert (rollout.n_steps, rollout.temperature, rollout.group_success_bounds) == (512, 1.0, (0.1, 0.9))
    assert (update.n_epochs, update.batch_size, update.lr, update.weight_decay) == (10, 2, 1e-6, 0.01)
    assert (update.max_grad_norm, update.target_kl, update.lora_rank, update.lora_alpha) == (1.0, None, 16, 16)
    assert (loss.clip_high, loss.kl_coef, loss.entropy_coef, loss.discount) == (0.28, 0.0, 0.0, 1.0)
    assert (loss.advantage, loss.ratio_level, loss.aggregation) == ("absolute", "chunk", "decision")
    assert (DEFAULT.task.train_init_states, DEFAULT.task.eval_init_states) == ((0, 40), (40, 50))
    assert DEFAULT.evaluation.eval_interval == 5_000


def test_flags_are_unique_across_sections():
    names = Counter(f.name for section in vars(DEFAULT).values() for f in fields(section))
    assert [name for name, uses in names.items() if uses > 1] == []


# config.json

configurations = st.builds(
    changed,
    task=st.fixed_dictionaries({"task_ids": st.lists(st.integers(0, 9), min_size=1, unique=True).map(tuple)}),
    simulator=st.fixed_dictionaries(
        {}, optional={"max_env_steps": st.none() | st.integers(1, 500), "bddl_file": st.none() | st.text()}
    ),
    update=st.fixed_dictionaries(
        {
            "lr": st.floats(1e-12, 1),
            "target_kl": st.none() | st.floats(1e-6, 1),
            "micro_batch_size": st.just("auto") | st.integers(1, 2**63 - 1),
        }
    ),
    rollout=st.fixed_dictionaries({"group_success_bounds": st.tuples(st.floats(0, 0.5), st.floats(0.5, 1))}),
    phases=st.fixed_dictionaries({"warmup": st.booleans()}),
)


def through_json(config: TrainConfig) -> TrainConfig:
    return from_dict(json.loads(json.dumps(to_dict(config))), "RUN/config.json")


@given(configurations)
def test_a_trip_through_json_changes_nothing(config):
    assert through_json(config) == config
    assert differing_fields(config, through_json(config)) == {}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_stored(preset):
    assert through_json(PRESETS[preset]) == PRESETS[preset]


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        ("update", "lr", None, "update.lr is None"),
        ("update", "lr", "0.5", "update.lr is '0.5'"),
        ("update", "n_epochs", 1.5, "update.n_epochs is 1.5"),
        ("update", "batch_size", 0, "--batch-size must be positive"),
        ("phases", "teacher", "expert", "phases.teacher is 'expert'"),
        ("task", "task_ids", ["0"], "task.task_ids.0 is '0'"),
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
    del stored["phases"]
    with pytest.raises(BadInput, match=r"phases\..* is missing"):
        from_dict(stored, "RUN/config.json")
    for what in (None, [], {"task": [1, 2]}):
        with pytest.raises(BadInput, match=r"RUN/config\.json: .* is .*: Input should be an object"):
            from_dict(what, "RUN/config.json")


# evaluation


def test_all_suites_are_those_of_the_published_tables_and_none_comes_twice():
    published = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    assert EvalConfig(task_suite=("all",)).suites == published
    assert EvalConfig(task_suite=("all", "libero_90", "libero_goal")).suites == (*published, "libero_90")
