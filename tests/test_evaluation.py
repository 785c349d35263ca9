"""The evaluations of a run: same states and numbers every time, what is kept, what they stop, what is the best."""

import json
from collections import Counter
from collections.abc import Iterator

import imageio.v2 as imageio
import numpy as np
import pytest
import torch

from configs.config import EvaluationConfig, PhaseConfig, RunConfig, TaskConfig, TrainConfig
from contracts import BadInput, resolve_pointer
from experiment import evaluation
from experiment.checkpoints import TrainerState, save_checkpoint
from experiment.evaluation import (
    Validation,
    check_baseline,
    evaluate,
    evaluate_and_record,
    evaluation_is_due,
    validate,
)
from experiment.run_folder import METRICS_FILE, Run, read_metrics
from experiment.statistics import Successes
from experiment.videos import write_video
from rl.trajectory import Episode
from rl.update import Learner
from tests.fakes import FakePolicy, FakePool, Script, adamw


def test_every_evaluation_draws_the_same_numbers():
    episodes = [Episode(i, 0, 40 + i, i) for i in range(4)]

    def tokens(seed: int, slots: int) -> list:
        pool = FakePool(lambda *_: Script(9), slots, order_seed=slots)
        torch.rand(7)  # history does not matter
        played = evaluate(FakePolicy(), pool, episodes, "sample", seed=seed).trajectories
        return [d.tokens.tolist() for t in played for d in t.decisions]

    assert tokens(0, 1) == tokens(0, 1) == tokens(0, 3)
    assert tokens(0, 1) != tokens(1, 1)


# validate


def small_config(**evaluation) -> TrainConfig:
    return TrainConfig(
        task=TaskConfig(task_ids=(0, 1), eval_init_states=(40, 43)), evaluation=EvaluationConfig(**evaluation)
    )


def solvable_on_task_0() -> FakePool:
    return FakePool(lambda task_id, _: Script(9, success=task_id == 0))


def test_all_play_the_same_held_out_states_and_only_sampling_repeats_them():
    pool, policy = solvable_on_task_0(), FakePolicy(adapter_scale=0.1)
    validation = validate(policy, pool, small_config(eval_trials=2), "greedy", known_teacher=None)
    assert Counter(pool.started) == {(task, state): 1 + 1 + 2 for task in (0, 1) for state in (40, 41, 42)}
    assert validation.teacher == validation.student == Successes(3, 6)
    assert validation.student_sampled == Successes(6, 12)
    assert [validation.metrics()[f"eval/student_sampled_success_task_{task}"] for task in (0, 1)] == [1, 0]
    assert list(dict.fromkeys(mode for mode, _ in policy.modes)) == [
        "teacher greedy",
        "student greedy",
        "student sample",
    ]
    filmed = {name: (len(played), len(played[0].frames)) for name, played in validation.trajectories.items()}
    assert filmed == {"teacher": (6, 9), "student": (6, 9), "student_sampled": (12, 0)}


@pytest.mark.parametrize(
    ("scale", "mode", "started"), [(0.0, "greedy", 6), (0.1, "greedy", 12), (0.0, "l1", 12)]
)
def test_a_student_that_is_its_teacher_still_is_not_played_beside_it(scale, mode, started):
    pool = solvable_on_task_0()
    validation = validate(FakePolicy(adapter_scale=scale), pool, small_config(eval_trials=0), mode, None)
    assert len(pool.started) == started
    assert validation.student == validation.teacher == Successes(3, 6)
    assert len(validation.trajectories["student"]) == 6
    assert str(validation) == "teacher 3/6 = 50 % [19, 81], student 3/6 = 50 % [19, 81]"
    assert not any("sampled" in name for name in validation.metrics())


# in a run

CONFIG = TrainConfig(
    task=TaskConfig(eval_init_states=(40, 50)),
    evaluation=EvaluationConfig(eval_interval=100, eval_trials=2),
    run=RunConfig(wandb_mode="disabled"),
)


@pytest.fixture
def learner() -> Learner:
    policy = FakePolicy()
    return Learner(policy, None, adamw(policy))


@pytest.fixture
def run(tmp_path, learner) -> Iterator[Run]:
    (tmp_path / "checkpoints").mkdir()
    run = Run(tmp_path, CONFIG)
    yield run
    run.close()


def evaluate_at(step: int, run, learner, state, successes: int, config=CONFIG) -> None:
    """Save a checkpoint and evaluate where `successes` of the ten held-out states succeed."""
    state.global_step = step
    save_checkpoint(run.checkpoints, learner, state, keep=9)
    pool = FakePool(lambda _, init_state: Script(8, success=init_state < 40 + successes))
    evaluate_and_record(config, run, learner, pool, state)


@pytest.mark.parametrize(
    ("evaluated_at", "global_step", "due"),
    [(None, 0, True), (None, 57, True), (0, 0, False), (0, 99, False), (0, 100, True), (0, 257, True),
     (130, 199, False), (130, 200, True)],
)  # fmt: skip
def test_evaluations_are_due_at_the_start_and_when_a_multiple_of_the_interval_is_passed(
    evaluated_at, global_step, due
):
    assert evaluation_is_due(CONFIG, TrainerState(global_step, evaluated_at=evaluated_at)) == due


def test_an_evaluation_is_recorded_filmed_and_remembered(run, learner):
    state = TrainerState(update=3)
    evaluate_at(120, run, learner, state, successes=7)
    (row,) = read_metrics(run.folder / METRICS_FILE)
    assert (row["global_step"], row["update"], row["eval/student_success"], row["eval/gap"]) == (
        120,
        3,
        0.7,
        0.0,
    )
    assert row["time/eval"] > 0
    assert sorted(p.name for p in (run.folder / "videos").iterdir()) == [
        "student-step_120.mp4",
        "teacher-step_120.mp4",
    ]
    assert (state.evaluated_at, state.teacher_k, state.teacher_n) == (120, 7, 10)
    assert not evaluation_is_due(CONFIG, state)
    kept = json.loads((run.folder / "evaluations" / "step_120.json").read_text())
    assert set(kept) == {"teacher", "student", "student_sampled"}
    assert kept["student"][:2] == [
        {"task_id": 0, "init_state_id": 40, "trial": 0, "success": True, "env_steps": 8},
        {"task_id": 0, "init_state_id": 41, "trial": 0, "success": True, "env_steps": 8},
    ]
    assert [record["trial"] for record in kept["student_sampled"]] == [
        trial for trial in range(2) for _ in range(10)
    ]


def test_the_teacher_plays_once_in_a_run(run, learner):
    state = TrainerState()
    evaluate_at(0, run, learner, state, successes=7)
    learner.policy.modes.clear()
    evaluate_at(100, run, learner, state, successes=2)
    assert not [mode for mode, batch in learner.policy.modes if mode.startswith("teacher")]
    assert (state.teacher_k, state.teacher_n) == (7, 10)


def test_the_best_has_the_highest_lower_bound(run, learner):
    state, best = TrainerState(), []
    for step, successes in ((0, 5), (100, 8), (200, 6), (300, 9)):
        evaluate_at(step, run, learner, state, successes)
        best.append(resolve_pointer(run.checkpoints / "best").name)
    assert best == ["step_0", "step_100", "step_100", "step_300"]
    metadata = json.loads((resolve_pointer(run.checkpoints / "best") / "metadata.json").read_text())
    assert metadata["score"] == metadata["eval/student_success_low"] < 0.9


# baseline


def check(phases: PhaseConfig, teacher: int, sampled: int, allow: bool = False) -> None:
    config = TrainConfig(phases=phases, evaluation=EvaluationConfig(allow_zero_baseline=allow))
    check_baseline(config, Validation(Successes(teacher, 10), Successes(3, 10), Successes(sampled, 10), {}))


TRANSITION_ONLY = PhaseConfig(
    warmup_steps=0, transition_steps=100
)  # epsilon starts at 1: the teacher acts first


@pytest.mark.parametrize("phases", [PhaseConfig(), PhaseConfig(warmup_actor="student"), TRANSITION_ONLY])
def test_a_hopeless_teacher_stops_a_run_that_it_begins(phases):
    with pytest.raises(BadInput, match=r"teacher succeeded in 0 of 10 .*--allow-zero-baseline"):
        check(phases, teacher=0, sampled=9)
    check(phases, teacher=1, sampled=0)
    check(phases, teacher=0, sampled=0, allow=True)


def test_pure_rl_is_stopped_by_a_hopeless_student_and_warned_of_one_that_nearly_always_succeeds(caplog):
    pure_rl = PhaseConfig(warmup=False)
    with pytest.raises(BadInput, match="the student succeeded in 0 of 10"):
        check(pure_rl, teacher=9, sampled=0)
    check(pure_rl, teacher=9, sampled=0, allow=True)
    check(pure_rl, teacher=0, sampled=9)
    assert not caplog.messages
    check(pure_rl, teacher=9, sampled=10)
    assert "begins with 10/10 = 100 % [72, 100]: there is little room for improvement" in caplog.text


# what is kept


@pytest.mark.parametrize("what", ["write_json", "write_video"])
def test_files_that_cannot_be_written_cost_one_line_and_not_the_run(run, learner, monkeypatch, caplog, what):
    def broken(*_, **__):
        raise OSError("no space left on device\nreally")

    monkeypatch.setattr(evaluation, what, broken)
    evaluate_at(120, run, learner, TrainerState(best_score=1.0), successes=1)
    line = "step 120: files of the evaluation could not be written (no space left on device)"
    assert [message for message in caplog.messages if "could not" in message] == [line]
    assert read_metrics(run.folder / METRICS_FILE)


def test_every_frame_comes_back_at_20_per_second(tmp_path):
    frames = np.zeros((12, 256, 256, 3), dtype=np.uint8)
    for i, frame in enumerate(frames):
        frame[128:, : 20 * i, 2] = 200  # a blue bar that grows in the lower half
    path = tmp_path / "new" / "there.mp4"
    write_video(path, list(frames))
    with imageio.get_reader(path) as reader:
        read = np.stack([reader.get_data(i) for i in range(reader.count_frames())]).astype(float)
        assert (reader.get_meta_data()["fps"], reader.get_meta_data()["codec"]) == (20, "h264")
    assert np.abs(read - frames).mean() < 6  # H.264 is lossy
