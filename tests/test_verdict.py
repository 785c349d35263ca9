"""The sentence on top of a report: it compares the student with the policy that the run was given."""

import pytest

from experiment.stored_run import read_run
from experiment.verdict import judge
from tests.stored_runs import evaluation, store, store_outcomes


def judge_run(folder, before: str, after: str, total_steps=300, **settings):
    """The verdict on a run in which teacher and student, then the student solved the states with a 1."""
    outcomes = {"teacher": [state == "1" for state in before], "student": [False] * len(before)}
    rows = [evaluation(0, 9, 0, 4), evaluation(200, 9, 12, 4), evaluation(300, 9, 11, 4)]
    store(folder, rows, phases__total_steps=total_steps, **settings)
    store_outcomes(folder, 0, **outcomes)
    store_outcomes(folder, 300, student=[state == "1" for state in after])
    return judge(read_run(folder))


@pytest.mark.parametrize(
    ("before", "after", "kind", "p"),
    [
        ("00000001", "11111110", "chance", "p = 0.07"),  # 7 against 1: 2 * 9 / 2^8
        ("00000011", "11111111", "better", "p = 0.031"),  # 6 against none: 2 / 2^6
        ("111111111110", "000000000000", "worse", "p < 0.001"),  # 2 / 2^11
        ("01", "01", "chance", "p = 1"),
    ],
)
def test_a_difference_counts_if_chance_would_hardly_make_it(tmp_path, before, after, kind, p):
    verdict = judge_run(tmp_path, before, after)
    assert verdict.kind == kind
    assert "45 % -> 55 %" in verdict.sentence  # of metrics.jsonl
    assert f"({p}, {len(before)} episodes)" in verdict.sentence
    assert ("60 % at env step 200" in verdict.sentence) == (kind == "worse")
    assert ("more states" in verdict.sentence) == (kind == "chance")


def test_an_unfinished_run_is_not_said_to_be_at_its_end(tmp_path):
    assert "45 % -> 55 % so far: within chance" in judge_run(tmp_path, "01", "01", total_steps=400).sentence


def test_with_a_teacher_of_another_checkpoint_the_student_is_compared_with_its_own_start(tmp_path):
    verdict = judge_run(tmp_path, "111111", "111111", phases__teacher="RUN/checkpoints/best")
    assert verdict.kind == "better"
    assert "0 % -> 55 %" in verdict.sentence


@pytest.mark.parametrize("num_evaluations", [0, 1, 2])
def test_without_two_evaluations_or_their_episodes_nothing_is_claimed(tmp_path, num_evaluations):
    rows = [evaluation(0, 9, 8, 4), evaluation(300, 9, 20, 4)]
    assert judge(read_run(store(tmp_path, rows[:num_evaluations]))).kind == "open"
