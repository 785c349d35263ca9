"""A run is read back as it was written: counts, pairs of equal episodes, settings that differ."""

import pytest

from configs.presets import PRESETS
from errors import BadInput
from rl.evaluation import Successes
from rl.paired import Paired
from rl.stored_run import (
    GREEDY,
    changed_settings,
    changes,
    paired_difference,
    read_run,
    series,
    settings_that_differ,
    successes_of,
    task_changes,
)  # fmt: skip
from tests.stored_runs import ARGV, ROWS, evaluation, store, store_episodes, update


def episode(state: int, success: bool, trial: int = 0, task_id: int = 0) -> dict:
    return {"task_id": task_id, "init_state_id": state, "trial": trial, "success": success, "env_steps": 9}


def test_the_first_and_the_last_evaluation_are_compared(tmp_path):
    sampled, greedy, against_teacher = changes(read_run(store(tmp_path, ROWS)))
    assert (sampled.before, sampled.after) == (Successes(4, 20), Successes(16, 20))
    assert (greedy.before, greedy.after) == (Successes(8, 20), Successes(11, 20))
    assert (against_teacher.before, against_teacher.after) == (Successes(9, 20), Successes(11, 20))
    assert sampled.paired is None  # outcomes of episodes were not kept


def test_differences_are_paired_by_task_state_and_trial_in_any_order():
    before = [episode(30, True), episode(31, False), episode(31, True, trial=1), episode(30, False, task_id=1)]
    after = [episode(30, True, task_id=1), episode(31, True, trial=1), episode(31, True), episode(99, True)]
    assert paired_difference(before, after) == Paired(both=1, only_before=0, only_after=2, neither=0)
    assert paired_difference(before, []) is None


def test_the_student_is_paired_with_its_past_and_with_the_teacher(tmp_path):
    folder = store(tmp_path, ROWS)
    store_episodes(folder, 0, teacher=[True, True], student=[False, False], student_sampled=[False, True])
    store_episodes(folder, 300, student=[True, False], student_sampled=[True, True])
    store_episodes(folder, 9999, student_sampled=[False, False])  # of records that a resume cut off
    sampled, greedy, against_teacher = (change.paired for change in changes(read_run(folder)))
    assert (sampled.only_after, sampled.only_before, sampled.both) == (1, 0, 1)
    assert (greedy.only_after, greedy.neither) == (1, 1)
    assert (against_teacher.both, against_teacher.only_before) == (1, 1)


def test_counts_of_a_task_follow_from_its_rate():
    row = evaluation(0, 9, 7, 10, **{f"{GREEDY}_task_0": 0.6, f"{GREEDY}_task_4": 0.1})
    assert successes_of(row, f"{GREEDY}_task_0") == Successes(6, 10)
    assert successes_of(row, f"{GREEDY}_task_4") == Successes(1, 10)
    assert successes_of(row, GREEDY) == Successes(7, 20)


def test_a_single_task_has_the_total(tmp_path):
    run = read_run(store(tmp_path, ROWS))
    assert [change.after for change in task_changes(run)[0]] == [Successes(16, 20), Successes(11, 20)]


def test_the_best_evaluation_is_that_of_the_best_checkpoint(tmp_path):
    rows = [evaluation(0, 9, 5, 5), evaluation(100, 9, 8, 5), evaluation(200, 9, 8, 5), evaluation(300, 9, 6, 5)]
    assert read_run(store(tmp_path, rows)).best_evaluation["global_step"] == 100


@pytest.mark.parametrize(("total_steps", "finished"), [(300, True), (301, False)])
def test_a_run_is_finished_when_it_was_evaluated_at_its_last_step(tmp_path, total_steps, finished):
    assert read_run(store(tmp_path, ROWS, phases__total_steps=total_steps)).is_finished == finished


def test_series_leave_out_what_was_not_recorded():
    assert series(ROWS, "train/grad_norm") == ([100, 200], [1.5, 0.5])
    assert series([update(1, 0)], "nothing") == ([], [])


def test_settings_are_compared_with_the_preset_of_the_command(tmp_path):
    run = read_run(store(tmp_path, ROWS, run__seed=3, update__lr=0.001))
    assert changed_settings(run) == ("tiny", {"seed": (0, 3), "lr": (PRESETS["tiny"].update.lr, 0.001)})


def test_only_differing_settings_of_runs_are_listed(tmp_path):
    runs = [
        read_run(store(tmp_path / "a", ROWS, update__lr=0.1, run__name="a")),
        read_run(store(tmp_path / "b", ROWS, update__lr=0.2, run__name="b", run__seed=1)),
        read_run(store(tmp_path / "c", ROWS, update__lr=0.1, task__task_ids=[0, 1])),
    ]
    assert settings_that_differ(runs) == {
        "lr": [0.1, 0.2, 0.1], "seed": [0, 1, 0], "task_ids": [[0], [0], [0, 1]]
    }  # fmt: skip


def test_a_run_of_an_older_version_lacks_fields_and_is_read(tmp_path):
    folder = store(tmp_path, ROWS, run__seed=3)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"rerun": false, ', "").replace(', "rerun": false', ""))
    run = read_run(folder)
    assert "rerun" not in run.settings
    assert run.provenance["argv"] == ARGV
    assert changed_settings(run)[1] == {"seed": (0, 3)}


@pytest.mark.parametrize("content", [None, "{", '{"config": 3}', "{}"])
def test_what_is_no_run_folder_is_refused_in_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadInput, match="is not a run folder") as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_run_without_evaluations_has_nothing_to_compare(tmp_path):
    with pytest.raises(BadInput, match="no evaluation has been recorded yet"):
        changes(read_run(store(tmp_path, ROWS[1:2])))
