"""A run read back from its folder: what its training took, and which initial states it used."""

import pytest

from experiment.stored_run import read_training, was_trained_on
from tests.stored_runs import PROVENANCE, ROWS, store


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
