"""The evaluations of a run: when, what is recorded, what they stop, and which checkpoint they call the best."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from configs.config import EvaluationConfig, PhaseConfig, RunConfig, TaskConfig, TrainConfig
from errors import BadInput
from rl.checkpoints import TrainerState, save_checkpoint
from rl.evaluation import Successes, Validation
from rl.learner import Learner
from rl.run import Run, read_metrics
from rl.selfcheck import SelfCheckError, remember_teacher
from rl.validation import check_baseline, evaluate_and_record, evaluation_is_due, fell_below_baseline
from rl.wandb_log import WandbLog
from tests.fakes import FakePolicy, FakePool, Script, adamw, observation, parameters_of

CONFIG = TrainConfig(
    task=TaskConfig(eval_init_states=(40, 50)),
    evaluation=EvaluationConfig(eval_interval=100),
    run=RunConfig(wandb_mode="disabled"),
)


@pytest.fixture
def learner() -> Learner:
    policy = FakePolicy()
    return Learner(policy, None, adamw(policy))


@pytest.fixture
def run(tmp_path, learner) -> Iterator[Run]:
    (tmp_path / "checkpoints").mkdir()
    run = Run(tmp_path, CONFIG, WandbLog("disabled", "", "", tmp_path, {}, None))
    remember_teacher(run.teacher_file, learner.policy, observation(1, 2, 3), "greedy")
    yield run
    run.close()


def evaluate_at(step: int, run, learner, state, successes: int, config=CONFIG) -> Validation:
    """Save a checkpoint and evaluate where `successes` of the ten held-out states succeed."""
    state.global_step = step
    save_checkpoint(run.checkpoints, learner, state, keep=9)
    pool = FakePool(lambda _, init_state: Script(8, success=init_state < 40 + successes))
    return evaluate_and_record(config, run, learner, pool, state, "greedy")


# when


@pytest.mark.parametrize(
    ("evaluated_at", "global_step", "due"),
    [(None, 0, True), (None, 57, True), (0, 0, False), (0, 99, False), (0, 100, True), (0, 257, True),
     (130, 199, False), (130, 200, True)],
)  # fmt: skip
def test_evaluations_are_due_at_the_start_and_when_a_multiple_of_the_interval_is_passed(evaluated_at, global_step, due):
    assert evaluation_is_due(CONFIG, TrainerState(global_step, evaluated_at=evaluated_at)) == due


# what


def test_an_evaluation_is_recorded_filmed_and_remembered(run, learner):
    state = TrainerState(update=3)
    evaluate_at(120, run, learner, state, successes=7)
    (row,) = read_metrics(run.folder)
    assert (row["global_step"], row["update"], row["eval/student_success"], row["eval/gap"]) == (120, 3, 0.7, 0.0)
    assert row["time/eval"] > 0
    assert sorted(p.name for p in (run.folder / "videos").iterdir()) == ["student-step_120.mp4", "teacher-step_120.mp4"]
    assert (state.evaluated_at, state.teacher_k, state.teacher_n, state.baseline_rate) == (120, 7, 10, 0.7)
    assert not evaluation_is_due(CONFIG, state)


def test_the_teacher_plays_once_in_a_run(run, learner):
    state = TrainerState()
    evaluate_at(0, run, learner, state, successes=7)
    learner.policy.modes.clear()
    validation = evaluate_at(100, run, learner, state, successes=2)
    played = [mode for mode, batch in learner.policy.modes if mode.startswith("teacher")]
    assert len(played) == 1  # the self-check's one question
    assert validation.teacher == Successes(7, 10)


def test_the_best_has_the_highest_lower_bound(run, learner):
    state, best = TrainerState(), []
    for step, successes in ((0, 5), (100, 8), (200, 6), (300, 9)):
        evaluate_at(step, run, learner, state, successes)
        best.append((run.checkpoints / "best").resolve().name)
    assert best == ["step_0", "step_100", "step_100", "step_300"]
    metadata = json.loads((run.checkpoints / "best" / "metadata.json").read_text())
    assert metadata["score"] == metadata["eval/student_success_low"] < 0.9


def test_a_teacher_that_moved_is_found(run, learner):
    state = TrainerState()
    evaluate_at(0, run, learner, state, successes=5)
    learner.policy.base.mul_(-1)  # a frozen weight that was not
    with pytest.raises(SelfCheckError, match="the teacher has moved"):
        evaluate_at(100, run, learner, state, successes=5)


def test_training_the_student_does_not_move_the_teacher(run, learner):
    state = TrainerState()
    evaluate_at(0, run, learner, state, successes=5)
    with torch.no_grad():
        learner.policy.bias.normal_()
    evaluate_at(100, run, learner, state, successes=5)


# stopping below the baseline

STOPPING = replace(CONFIG, evaluation=replace(CONFIG.evaluation, stop_if_below_baseline=True))


@pytest.mark.parametrize(
    ("successes", "config", "stops"),
    [(9, STOPPING, False), (7, STOPPING, False), (6, STOPPING, True), (0, STOPPING, True), (0, CONFIG, False)],
)  # 7/10 is [0.40, 0.89], 6/10 is [0.31, 0.83]; the baseline is 0.85
def test_a_run_stops_when_the_whole_interval_lies_below_the_first_rate(run, learner, successes, config, stops):
    state = TrainerState()
    evaluate_at(0, run, learner, state, successes=9)
    weights = parameters_of(learner.policy)
    state.baseline_rate = 0.85
    with torch.no_grad():
        learner.policy.bias.normal_()
    validation = evaluate_at(100, run, learner, state, successes)
    assert fell_below_baseline(config, run, learner, state, validation) == stops
    restored = all(torch.equal(a, b) for a, b in zip(weights, parameters_of(learner.policy), strict=True))
    assert restored == stops


def test_the_first_evaluation_never_falls_below_itself(run, learner):
    state = TrainerState()
    for successes in (1, 10):
        state.evaluated_at = None
        validation = evaluate_at(0, run, learner, state, successes)
        assert not fell_below_baseline(STOPPING, run, learner, state, validation)


# baseline


def baseline(teacher: int, sampled: int) -> Validation:
    return Validation(Successes(teacher, 10), Successes(3, 10), Successes(sampled, 10), {})


def check(phases: PhaseConfig, validation: Validation, allow: bool = False) -> None:
    config = replace(TrainConfig(phases=phases), evaluation=EvaluationConfig(allow_zero_baseline=allow))
    check_baseline(config, validation)


WITH_WARMUP = PhaseConfig()
TRANSITION_ONLY = PhaseConfig(warmup_steps=0, transition_steps=100)  # epsilon starts at 1: the teacher acts first
PURE_RL = PhaseConfig(warmup=False)


@pytest.mark.parametrize("phases", [WITH_WARMUP, TRANSITION_ONLY])
def test_a_hopeless_teacher_stops_a_run_that_it_begins(phases):
    with pytest.raises(BadInput, match=r"teacher succeeded in 0 of 10 .*--allow-zero-baseline"):
        check(phases, baseline(teacher=0, sampled=9))
    check(phases, baseline(teacher=1, sampled=0))
    check(phases, baseline(teacher=0, sampled=0), allow=True)


def test_a_hopeless_student_stops_pure_rl():
    with pytest.raises(BadInput, match="sampled student succeeded in 0 of 10"):
        check(PURE_RL, baseline(teacher=9, sampled=0))
    check(PURE_RL, baseline(teacher=0, sampled=1))
    check(PURE_RL, baseline(teacher=0, sampled=0), allow=True)


def test_a_student_that_nearly_always_succeeds_is_warned_of(caplog):
    check(PURE_RL, baseline(teacher=9, sampled=9))
    assert not caplog.messages
    check(PURE_RL, baseline(teacher=9, sampled=10))
    assert "begins with 10/10 = 100 % [72, 100]: there is little room for improvement" in caplog.text
