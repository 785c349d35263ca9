"""The sentence on top of a report: both rates of the student, compared with the policy that the run was given."""

import pytest

from experiment.stored_run import read_run
from experiment.verdict import judge
from tests.stored_runs import evaluation, store, store_outcomes


def solved(states: str) -> list[bool]:
    return [state == "1" for state in states]


def judge_run(
    folder, greedy: tuple[str, str], sampled: tuple[str, str] = ("01", "01"), total_steps=300, **settings
):
    """The verdict on a run whose first and last evaluation solved the states with a 1."""
    rows = [evaluation(0, 9, 0, 4), evaluation(200, 9, 12, 4), evaluation(300, 9, 11, 4)]
    store(folder, rows, phases__total_steps=total_steps, **settings)
    never = [False] * len(greedy[0])
    store_outcomes(folder, 0, teacher=solved(greedy[0]), student=never, student_sampled=solved(sampled[0]))
    store_outcomes(folder, 300, student=solved(greedy[1]), student_sampled=solved(sampled[1]))
    return judge(read_run(folder))


@pytest.mark.parametrize(
    ("states", "kind", "p"),
    [
        (("00000001", "11111110"), "chance", "p = 0.07"),  # 7 against 1: 2 * 9 / 2^8
        (("00000011", "11111111"), "better", "p = 0.031"),  # 6 against none: 2 / 2^6
        (("111111111110", "000000000000"), "worse", "p < 0.001"),  # 2 / 2^11
    ],
)
@pytest.mark.parametrize("rate", ["greedy", "sampled"])
def test_a_difference_of_either_rate_counts_if_chance_would_hardly_make_it(tmp_path, states, kind, p, rate):
    verdict = judge_run(tmp_path, **({"greedy": ("01", "01")} | {rate: states}))
    assert verdict.kind == kind
    assert "sampled 4/20 = 20 % [8, 42] -> 4/20 = 20 % [8, 42]" in verdict.sentence  # of metrics.jsonl
    assert "greedy 9/20 = 45 % [26, 66] -> 11/20 = 55 % [34, 74]" in verdict.sentence
    assert f"({p})" in verdict.sentence
    assert ("env step 200" in verdict.sentence) == (kind == "worse")


def test_one_rate_that_is_worse_is_not_outweighed_by_the_other(tmp_path):
    assert judge_run(tmp_path, ("1" * 9, "0" * 9), ("0" * 9, "1" * 9)).kind == "worse"


def test_an_unfinished_run_is_not_said_to_be_at_its_end(tmp_path):
    assert "so far" in judge_run(tmp_path, ("01", "01"), total_steps=400).sentence


def test_with_a_teacher_of_another_checkpoint_the_student_is_compared_with_its_own_start(tmp_path):
    verdict = judge_run(tmp_path, ("111111", "111111"), phases__teacher="RUN/checkpoints/best")
    assert verdict.kind == "better"
    assert "greedy 0/20" in verdict.sentence


@pytest.mark.parametrize("num_evaluations", [0, 1, 2])
def test_without_two_evaluations_or_their_episodes_nothing_is_claimed(tmp_path, num_evaluations):
    rows = [evaluation(0, 9, 8, 4), evaluation(300, 9, 20, 4)]
    assert judge(read_run(store(tmp_path, rows[:num_evaluations]))).kind == "open"
