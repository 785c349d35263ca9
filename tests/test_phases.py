"""Phases against the table of the specification: WARMUP, TRANSITION, RL with every N allowed to be 0."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.config import TrainConfig, changed
from configs.sections import PhaseConfig
from contracts import BadInput
from rl.phases import Phase, phase_at, rollout_steps
from rl.teacher_choice import choose_teacher, settle_warmup

steps = st.integers(0, 200)


@given(step=steps, warmup=steps, transition=steps)
def test_phase_is_given_by_the_intervals_alone_and_without_warmup_all_is_rl(step, warmup, transition):
    without = PhaseConfig(warmup=False, warmup_steps=warmup, transition_steps=transition)
    assert (phase_at(step, without).phase, phase_at(step, without).epsilon_start) == (Phase.RL, 0.0)
    intervals = {
        Phase.WARMUP: range(0, warmup),
        Phase.TRANSITION: range(warmup, warmup + transition),
        Phase.RL: range(warmup + transition, 10**6),
    }
    state = phase_at(
        step, PhaseConfig(warmup_steps=warmup, transition_steps=transition, warmup_actor="teacher")
    )
    assert step in intervals[state.phase]
    assert state.distils == (state.phase is Phase.WARMUP)


@given(warmup=steps, transition=steps, step=steps)
def test_epsilon_starts_at_1_never_rises_and_falls_by_equal_amounts(warmup, transition, step):
    phases = PhaseConfig(warmup_steps=warmup, transition_steps=transition, warmup_actor="teacher")
    epsilon = phase_at(step, phases).epsilon_start
    next_epsilon = phase_at(step + 1, phases).epsilon_start
    in_transition = warmup <= step < warmup + transition
    assert 0 <= next_epsilon <= epsilon <= 1
    assert epsilon - next_epsilon == pytest.approx(1 / transition if in_transition else 0.0, abs=1e-9)
    assert phase_at(0, phases).epsilon_start == (1.0 if warmup + transition else 0.0)


def test_with_the_student_as_its_actor_the_warmup_has_no_teachers_decisions_and_the_rest_stays():
    lengths = {"warmup_steps": 100, "transition_steps": 100}
    student, teacher = (PhaseConfig(warmup_actor=actor, **lengths) for actor in ("student", "teacher"))
    assert [phase_at(step, student).epsilon_start for step in (0, 99, 100, 150, 200)] == [0, 0, 1, 0.5, 0]
    assert phase_at(50, student).distils
    assert all(phase_at(step, student) == phase_at(step, teacher) for step in range(100, 300, 7))


@given(warmup=st.integers(1, 60_000), n_steps=st.integers(500, 9_000), overshoot=st.integers(0, 300))
def test_the_transition_begins_where_it_should_and_no_rollout_is_a_small_rest(warmup, n_steps, overshoot):
    """Every rollout ends when its last episodes do, a little later than planned."""
    config = changed(TrainConfig(), warmup_steps=warmup, n_steps=n_steps)
    global_step = 0
    while global_step < warmup:
        steps = rollout_steps(global_step, config)
        assert min(n_steps, warmup - global_step) / 2 <= steps <= n_steps
        global_step += steps + overshoot
    assert global_step <= warmup + overshoot
    assert rollout_steps(global_step, config) == n_steps


def test_an_l1_head_is_the_teacher_unless_another_is_asked_for():
    def mode(teacher: str, can_act_by_l1: bool) -> str:
        return choose_teacher(PhaseConfig(teacher=teacher), "a/checkpoint", 0.0, can_act_by_l1).mode

    assert (mode("auto", True), mode("auto", False)) == ("l1", "greedy")
    assert [mode(teacher, True) for teacher in ("greedy", "median", "l1")] == ["greedy", "median", "l1"]


@pytest.mark.parametrize(("teacher", "target"), [("greedy", "soft"), ("median", "hard"), ("l1", "hard")])
def test_a_greedy_teacher_gives_its_distribution_to_the_warmup_unless_a_flag_says_otherwise(teacher, target):
    assert settle_warmup(TrainConfig(), teacher).phases.warmup_target == target
    other = "soft" if target == "hard" else "hard"
    named = changed(TrainConfig(), warmup_target=other)
    assert settle_warmup(named, teacher).phases.warmup_target == other


@pytest.mark.parametrize(
    ("phases", "kl_coef", "can_act_by_l1", "flag"),
    [
        ({"teacher": "l1"}, 0.0, False, "--teacher l1"),
        ({}, 0.1, True, "--kl-coef"),
        ({"warmup_target": "soft"}, 0.0, True, "--warmup-target soft"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused(phases, kl_coef, can_act_by_l1, flag):
    with pytest.raises(BadInput, match=flag):
        choose_teacher(PhaseConfig(**phases), "a/checkpoint", kl_coef, can_act_by_l1)


def test_beside_a_laplace_student_the_remedy_is_another_teacher():
    with pytest.raises(BadInput, match="leave out --teacher l1"):
        choose_teacher(PhaseConfig(teacher="l1"), "a/checkpoint", 0.1, can_act_by_l1=True, is_laplace=True)
