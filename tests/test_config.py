"""Configurations are checked values: contradictions are refused in one line."""

from collections import Counter
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.config import TrainConfig, changed
from configs.eval_config import EvalConfig
from contracts import BadInput

DEFAULT = TrainConfig()
SECTIONS = [type(section) for section in vars(DEFAULT).values()]


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"eval_init_states": (50, 40)}, "--eval-init-states"),
        ({"advantage": "gae", "ratio_level": "chunk"}, "--ratio-level token"),
        ({"curriculum": True}, "--task-ids"),
        ({"advantage": "group"}, "--group-size"),
        ({"temperature": float("nan")}, "--temperature"),
    ],
)
def test_contradictions_are_refused_with_the_flag(settings, flag):
    with pytest.raises(BadInput, match=flag):
        changed(DEFAULT, **settings)


@given(st.integers(0, 49), st.integers(1, 50), st.integers(0, 49), st.integers(1, 50))
def test_no_initial_state_is_both_trained_on_and_evaluated(first, end, first_held_out, end_held_out):
    train = range(first, end)
    held_out = range(first_held_out, end_held_out)
    if not train or not held_out:
        return
    settings = {"train_init_states": (first, end), "eval_init_states": (first_held_out, end_held_out)}
    if set(train) & set(held_out):
        with pytest.raises(BadInput, match="--train-init-states fresh"):
            changed(DEFAULT, **settings)
    else:
        changed(DEFAULT, **settings)
    changed(DEFAULT, train_init_states="fresh", eval_init_states=(first_held_out, end_held_out))


def test_flags_are_unique_across_sections():
    names = Counter(field.name for section in SECTIONS for field in fields(section))
    assert [name for name, uses in names.items() if uses > 1] == []


# evaluation


def test_all_suites_are_those_of_the_published_tables_and_none_comes_twice():
    published = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    assert EvalConfig(task_suite=("all",)).suites == published
    assert EvalConfig(task_suite=("all", "libero_90", "libero_goal")).suites == (*published, "libero_90")
