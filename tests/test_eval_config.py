"""The settings of eval.py."""

import pytest

from configs.config import EvalConfig, parse_eval
from errors import BadInput

CHECKPOINT = ["--checkpoint", "runs/RUN/checkpoints/best"]


def test_the_default_is_the_published_protocol():
    config = parse_eval(CHECKPOINT)
    assert (config.trials, config.first_init_state, config.task_ids, config.temperature) == (50, 0, None, None)
    assert config.checkpoint == "runs/RUN/checkpoints/best"


def test_flags_are_flat():
    config = parse_eval([*CHECKPOINT, "--task-suite", "libero_goal", "--task-id", "3", "4", "--trials", "5",
                         "--temperature", "1.6", "--out", "results.json"])  # fmt: skip
    assert config == EvalConfig(
        CHECKPOINT[1], task_suite=("libero_goal",), task_ids=(3, 4), trials=5, temperature=1.6, out="results.json"
    )


def test_all_suites_are_those_of_the_published_tables_and_none_comes_twice():
    published = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    assert parse_eval([*CHECKPOINT, "--task-suite", "all"]).suites == published
    assert parse_eval([*CHECKPOINT, "--task-suite", "all", "libero_90", "libero_goal"]).suites == (
        *published, "libero_90",
    )  # fmt: skip


def test_the_protocol_in_one_flag_is_50_greedy_episodes_of_every_task():
    config = parse_eval([*CHECKPOINT, "--protocol", "libero", "--num-envs", "8", "--video", "failures"])
    assert (config.trials, config.first_init_state, config.task_ids, config.temperature) == (50, 0, None, None)


@pytest.mark.parametrize(
    "contradiction",
    [["--trials", "5"], ["--first-init-state", "40"], ["--temperature", "1"], ["--mode", "sample"], ["--task-id", "0"]],
)
def test_what_contradicts_the_protocol_is_refused_by_name(contradiction):
    with pytest.raises(BadInput, match=contradiction[0]):
        parse_eval([*CHECKPOINT, "--protocol", "libero", *contradiction])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--checkpoint is missing"),
        ([*CHECKPOINT, "--trials", "0"], "--trials must be at least 1"),
        ([*CHECKPOINT, "--num-envs", "0"], "--num-envs must be at least 1"),
        ([*CHECKPOINT, "--first-init-state", "-1"], "--first-init-state must not be negative"),
        ([*CHECKPOINT, "--temperature", "0"], "--temperature 0.0"),
        ([*CHECKPOINT, "--temperature", "1", "--mode", "greedy"], "--mode sample"),
        ([*CHECKPOINT, "--temperature", "1", "--mode", "l1"], "--mode sample"),
        ([*CHECKPOINT, "--mode", "magic"], "magic"),
        ([*CHECKPOINT, "--task-suite", "libero"], "libero"),
        ([*CHECKPOINT, "--task-suite"], "--task-suite"),
        ([*CHECKPOINT, "--seed", "-1"], "--seed must not be negative"),
        ([*CHECKPOINT, "--video", "some"], "some"),
        ([*CHECKPOINT, "--protocol", "other"], "other"),
        ([*CHECKPOINT, "--bddl-file", "x.bddl", "--task-id", "3"], "--bddl-file is one task"),
        ([*CHECKPOINT, "--bddl-file", "x.bddl", "--task-suite", "all"], "--bddl-file is one task"),
        ([*CHECKPOINT, "--nothing"], "--nothing"),
    ],
)
def test_wrong_flags_are_answered_in_one_line(argv, said):
    with pytest.raises(BadInput) as caught:
        parse_eval(argv)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["auto", "sample"])
def test_a_temperature_goes_with_sampling(mode):
    assert parse_eval([*CHECKPOINT, "--temperature", "0.5", "--mode", mode]).temperature == 0.5
