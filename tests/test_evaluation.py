"""Evaluation: Wilson intervals against published values, the same random numbers and states every time."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.config import EvaluationConfig, TaskConfig, TrainConfig
from rl.evaluation import Successes, Validation, count, evaluate, validate, wilson_interval
from rl.rollout import Acting, Randomness, collect
from rl.trajectory import Episode
from tests.fakes import FakePolicy, FakePool, Script, trajectory

SAMPLED = Acting(0.0, 1.0)


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3 (score, no continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # R: prop.test(8, 10, correct = FALSE)
        (8, 10, 0.4902, 0.9433),
    ],
)
def test_wilson_interval_has_published_values(k, n, low, high):
    assert wilson_interval(k, n) == pytest.approx((low, high), abs=6e-5)


@given(n=st.integers(1, 2000), data=st.data())
def test_wilson_interval_holds_the_rates_whose_score_test_accepts_the_outcome(n, data):
    k = data.draw(st.integers(0, n))
    z, rate = 1.959963984540054, k / n
    for bound in wilson_interval(k, n):
        if 0 < bound < 1:  # at the bounds the score statistic is exactly z
            assert (rate - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound) / n, abs=1e-9)


@given(n=st.integers(1, 500), data=st.data())
def test_wilson_interval_contains_the_rate_and_mirrors_success_and_failure(n, data):
    k = data.draw(st.integers(0, n))
    low, high = wilson_interval(k, n)
    assert 0 <= low < high <= 1
    assert low - 1e-12 <= k / n <= high + 1e-12
    assert wilson_interval(n - k, n) == pytest.approx((1 - high, 1 - low))


def test_no_success_has_a_lower_bound_of_exactly_0_and_no_failure_an_upper_one_of_exactly_1():
    # Else a perfect evaluation lies "below" an equally perfect baseline.
    assert [n for n in range(1, 101) if wilson_interval(0, n)[0] != 0 or wilson_interval(n, n)[1] != 1] == []


def test_no_episodes_say_nothing():
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_successes_are_counted_and_reported_with_k_n_and_interval():
    successes = count([trajectory(1, success=i < 8) for i in range(10)])
    assert successes == Successes(8, 10)
    assert successes.metrics("eval/x") == pytest.approx(
        {"eval/x": 0.8, "eval/x_k": 8, "eval/x_n": 10, "eval/x_low": 0.4902, "eval/x_high": 0.9433}, abs=1e-4
    )
    assert str(successes) == "8/10 = 80 % [49, 94]"


def test_every_evaluation_draws_the_same_numbers():
    episodes = [Episode(i, 0, 40 + i, i) for i in range(4)]

    def tokens(seed: int, slots: int) -> list:
        pool = FakePool(lambda *_: Script(9), slots, order_seed=slots)
        torch.rand(7)  # history does not matter
        played = evaluate(FakePolicy(), pool, episodes, SAMPLED, seed).trajectories
        return [d.tokens.tolist() for t in played for d in t.decisions]

    assert tokens(0, 1) == tokens(0, 1) == tokens(0, 3)
    assert tokens(0, 1) != tokens(1, 1)


def test_an_evaluation_draws_other_numbers_than_training():
    episodes = [Episode(i, 0, 40 + i, i) for i in range(2)]
    pool = FakePool(lambda *_: Script(9))
    training = collect(FakePolicy(), pool, episodes, SAMPLED, Randomness(0, "rollout", 0)).trajectories
    evaluation = evaluate(FakePolicy(), pool, episodes, SAMPLED, seed=0).trajectories
    assert not torch.equal(training[0].decisions[0].tokens, evaluation[0].decisions[0].tokens)


# validate


def small_config(**evaluation) -> TrainConfig:
    return TrainConfig(
        task=TaskConfig(task_ids=(0, 1), eval_init_states=(40, 43)), evaluation=EvaluationConfig(**evaluation)
    )


def solvable_on_task_0() -> FakePool:
    return FakePool(lambda task_id, _: Script(9, success=task_id == 0))


def test_all_play_the_same_held_out_states_and_only_sampling_repeats_them():
    pool, policy = solvable_on_task_0(), FakePolicy()
    validation = validate(policy, pool, small_config(eval_trials=2), "greedy", known_teacher=None)
    assert Counter(pool.started) == {(task, state): 1 + 1 + 2 for task in (0, 1) for state in (40, 41, 42)}
    assert validation.teacher == validation.student == Successes(3, 6)
    assert validation.student_sampled == Successes(6, 12)
    assert list(dict.fromkeys(mode for mode, _ in policy.modes)) == [
        "teacher greedy",
        "student greedy",
        "student sample",
    ]
    assert {name: len(t.frames) for name, t in validation.filmed.items()} == {"teacher": 9, "student": 9}
    assert {name: len(played) for name, played in validation.played.items()} == {
        "teacher": 6, "student": 6, "student_sampled": 12
    }  # fmt: skip


def test_a_known_teacher_is_not_played_again():
    pool, policy = solvable_on_task_0(), FakePolicy()
    validation = validate(policy, pool, small_config(), "greedy", known_teacher=Successes(5, 6))
    assert validation.teacher == Successes(5, 6)
    assert not any(mode.startswith("teacher") for mode, _ in policy.modes)
    assert list(validation.filmed) == ["student"]


def test_the_l1_teacher_is_evaluated_by_its_head():
    policy = FakePolicy()
    validate(policy, solvable_on_task_0(), small_config(), "l1", known_teacher=None)
    assert policy.modes[0][0] == "teacher l1"


def test_validation_metrics_have_the_names_of_the_specification():
    metrics = Validation(Successes(6, 10), Successes(5, 10), Successes(2, 10), {}).metrics()
    for name in ("teacher_success", "student_success", "student_sampled_success"):
        assert {f"eval/{name}{suffix}" for suffix in ("", "_k", "_n", "_low", "_high")} <= set(metrics)
    assert metrics["eval/gap"] == pytest.approx(0.1)
