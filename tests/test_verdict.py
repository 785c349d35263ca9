"""What the evaluations of a run say: both rates of the student, compared with the policy that the run was given."""

import shlex

import pytest

from configs.cli import parse_eval
from experiment.statistics import Paired
from experiment.stored_run import read_run
from experiment.verdict import changes, command_for_more_states, judge, read_evaluations
from tests.stored_runs import evaluation, store, store_episodes


def judged(folder, greedy: tuple[str, str], sampled: tuple[str, str] = ("01", "01")):
    """The verdict on a run whose first and last evaluation solved the states with a 1, and one between them all."""
    store(folder, [evaluation(0), evaluation(200), evaluation(300)], phases__total_steps=300)
    always = "1" * len(greedy[0])
    store_episodes(folder, 0, teacher=always, greedy=greedy[0], sampled=sampled[0])
    store_episodes(folder, 200, greedy="1" * len(greedy[0]))
    store_episodes(folder, 300, greedy=greedy[1], sampled=sampled[1])
    run = read_run(folder)
    return judge(run, read_evaluations(run))


@pytest.mark.parametrize(
    ("states", "kind"),
    [
        (("00000001", "11111110"), "within chance"),  # 7 against 1: p = 2 * 9 / 2^8
        (("00000011", "11111111"), "better"),  # 6 against none: p = 2 / 2^6
        (("111111111110", "000000000000"), "worse"),  # p = 2 / 2^11
    ],
)
@pytest.mark.parametrize("rate", ["greedy", "sampled"])
def test_a_difference_of_either_rate_counts_if_chance_would_hardly_make_it(tmp_path, states, kind, rate):
    verdict = judged(tmp_path, **({"greedy": ("01", "01")} | {rate: states}))
    assert verdict.kind == kind
    names_the_best = any("env step 200" in line for line in verdict.lines)
    assert names_the_best == (kind == "worse")


def test_a_difference_within_chance_comes_with_a_command_that_eval_py_accepts(tmp_path):
    *_, last = judged(tmp_path, greedy=("01", "01")).lines
    *_, argv = last.partition("eval.py ")
    config = parse_eval(shlex.split(argv))
    assert config.model.checkpoint == f"{tmp_path}/checkpoints/latest"


def test_a_run_on_liberos_variants_is_told_no_such_command(tmp_path):
    states = {"task__train_init_states": (0, 80), "task__eval_init_states": (80, 116)}
    store(
        tmp_path,
        [evaluation(0), evaluation(300)],
        phases__total_steps=300,
        task__task_suite="libero_spatial_plus",
        **states,
    )
    for env_steps in (0, 300):
        store_episodes(tmp_path, env_steps, teacher="01", greedy="01", sampled="01")
    run = read_run(tmp_path)
    assert judge(run, read_evaluations(run)).lines[-1] == "train longer"


def test_that_command_plays_the_episodes_as_the_run_plays_them(tmp_path):
    settings = {
        "simulator__max_env_steps": 16,
        "simulator__bddl_file": "my task.bddl",
        "task__task_suite": "libero_goal",
        "model__unnorm_key": "libero_goal_no_noops",
        "model__l1_student": "tokens",
        "rollout__temperature": 1.6,
    }
    run = read_run(store(tmp_path, [evaluation(0)], **settings))
    _, *argv = shlex.split(command_for_more_states(run).removeprefix("python "))
    config = parse_eval(argv)
    assert config.simulator == run.config.simulator
    assert config.task_suite == ("libero_goal",)
    assert config.model.unnorm_key == "libero_goal_no_noops"
    assert config.model.l1_student == "laplace"  # so that a start with an L1 head is played by that head
    assert config.temperature == 1.6
    assert config.init_states == "fresh"  # a task file has no official ones


def test_one_rate_that_is_worse_is_not_outweighed_by_the_other(tmp_path):
    assert judged(tmp_path, ("1" * 9, "0" * 9), ("0" * 9, "1" * 9)).kind == "worse"


def test_without_two_evaluations_nothing_is_claimed(tmp_path):
    run = read_run(store(tmp_path, [evaluation(0), evaluation(300)]))
    store_episodes(tmp_path, 0, teacher="01", greedy="01", sampled="00")
    store_episodes(tmp_path, 9999, greedy="11")  # of records that a resume cut off
    verdict = judge(run, read_evaluations(run))
    assert verdict.kind == "open"
    assert "sampled 0/2 = 0 % [0, 66]" in verdict.lines


def test_a_token_head_that_knew_nothing_is_compared_with_the_l1_head_that_taught_it(tmp_path):
    run = read_run(store(tmp_path, [evaluation(0), evaluation(300)]))
    store_episodes(tmp_path, 0, head="111110", greedy="000000", sampled="000000")
    store_episodes(tmp_path, 300, greedy="111001", sampled="111111")
    pairs = changes(run, read_evaluations(run))
    assert pairs["L1 head to greedy"] == Paired(both=3, only_before=2, only_after=1, neither=0)
    assert pairs["sampled"].only_after == 6
