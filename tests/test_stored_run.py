"""A run read back from its folder: what changed, which evaluation was the best, what its training took."""

import pytest

from experiment.stored_run import changes, read_run, read_training, was_trained_on
from tests.stored_runs import PROVENANCE, ROWS, evaluation, store, store_outcomes


def test_the_student_is_paired_with_its_past_and_with_the_teacher(tmp_path):
    folder = store(tmp_path, ROWS)
    store_outcomes(folder, 0, teacher=[True, True], student=[False, False], student_sampled=[False, True])
    store_outcomes(folder, 300, student=[True, False], student_sampled=[True, True])
    store_outcomes(folder, 9999, student_sampled=[False, False])  # of records that a resume cut off
    sampled, greedy, against_teacher, *by_task = (change.paired for change in changes(read_run(folder)))
    assert (sampled.only_after, sampled.only_before, sampled.both) == (1, 0, 1)
    assert (greedy.only_after, greedy.neither) == (1, 1)
    assert (against_teacher.both, against_teacher.only_before) == (1, 1)
    assert [pairs.n for pairs in by_task] == [1] * 4  # sampled and greedy on both tasks
    assert (by_task[0].only_after, by_task[1].both) == (1, 1)


def test_without_sampled_episodes_or_outcomes_the_rates_remain(tmp_path):
    rows = [{key: value for key, value in row.items() if "sampled" not in key} for row in ROWS]
    labels = [change.label for change in changes(read_run(store(tmp_path, rows)))]
    assert labels == ["student, greedy", "teacher, then greedy student"]
    assert all(change.paired is None for change in changes(read_run(tmp_path)))


def test_a_student_that_began_as_its_teacher_is_compared_once(tmp_path):
    rows = [evaluation(0, 8, 8, 4), evaluation(300, 8, 11, 16)]
    labels = [change.label for change in changes(read_run(store(tmp_path, rows)))]
    assert labels == ["student, sampled", "student, greedy"]
    assert changes(read_run(store(tmp_path / "begun", rows[:1]))) == []  # it is not a change from itself


def test_a_checkpoint_knows_what_its_training_took(tmp_path):
    folder = store(tmp_path / "run", [*ROWS[:-1], ROWS[-1] | {"system/gpu_mem_gb": 3.0}])
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best").write_text("step_200\n")
    training = read_training(folder / "checkpoints" / "best")
    assert (training["env_steps"], training["peak_gpu_gib"]) == (200, 0.0)  # not what came after it
    assert training["hours"] == training["gpu_hours"] == pytest.approx((7 + 5 + 5 + 7) / 3600)
    assert training["config"]["run"]["seed"] == 0
    assert (training["machine"], training["run"]) == (PROVENANCE["machine"], "run")
    assert read_training(folder / "checkpoints" / "step_300")["peak_gpu_gib"] == 3.0


def test_training_on_a_cpu_takes_no_gpu_hours(tmp_path):
    folder = store(tmp_path, ROWS, model__device="cpu")
    assert read_training(folder / "checkpoints" / "step_300")["gpu_hours"] == 0


def test_a_checkpoint_outside_a_run_folder_has_no_training(tmp_path):
    assert read_training(tmp_path / "merged") is None
    assert read_training(tmp_path / "step_300") is None


@pytest.mark.parametrize(
    ("states", "task_suite", "task_id", "init_state_id", "trained"),
    [
        ([0, 40], "libero_spatial", 4, 39, True),
        ([0, 40], "libero_spatial", 4, 40, False),
        ([0, 40], "libero_spatial", 5, 39, False),
        ([0, 40], "libero_goal", 4, 39, False),
        ("fresh", "libero_spatial", 4, 39, False),
    ],
)
def test_a_checkpoint_knows_which_initial_states_it_was_trained_on(
    tmp_path, states, task_suite, task_id, init_state_id, trained
):
    folder = store(tmp_path, ROWS, task__task_ids=[0, 4], task__train_init_states=states)
    training = read_training(folder / "checkpoints" / "step_300")
    assert was_trained_on(training, task_suite, task_id, init_state_id) is trained


@pytest.mark.parametrize(
    ("of_run", "of_evaluation", "trained"),
    [("own.bddl", "own.bddl", True), ("own.bddl", "./own.bddl", True), ("own.bddl", "other.bddl", False),
     ("own.bddl", None, False), (None, "own.bddl", False)],
)  # fmt: skip
def test_an_own_task_is_not_the_task_of_the_suite_that_has_its_number(
    tmp_path, of_run, of_evaluation, trained
):
    states = {"task__task_ids": [0], "task__train_init_states": [0, 40]}
    folder = store(tmp_path, ROWS, simulator__bddl_file=of_run, **states)
    training = read_training(folder / "checkpoints" / "step_300")
    assert was_trained_on(training, "libero_spatial", 0, 3, of_evaluation) is trained


def test_the_best_evaluation_is_that_of_the_best_checkpoint(tmp_path):
    rows = [evaluation(step, 9, greedy, 5) for step, greedy in ((0, 5), (100, 8), (200, 8), (300, 6))]
    assert read_run(store(tmp_path, rows)).best_evaluation["global_step"] == 100
