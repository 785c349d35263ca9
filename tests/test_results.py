"""The results file: read back as written, refused where it is of something else, compared pair by pair."""

import json
from dataclasses import replace

import pytest

from errors import BadInput
from rl.eval_plan import Task, make_plan
from rl.evaluation import wilson_interval
from rl.results import PlayedEpisode, Results, Settings, check_comparable, open_results, read_results, save_results
from rl.results_table import results_table

SETTINGS = Settings("runs/R/checkpoints/best", "abc", "greedy", None, 0, "low-poly", None, "cpu", "float32")
TASKS = [Task("libero_goal", i, f"task_{i}", f"do {i}", 300, 50) for i in range(2)]
PLAN = make_plan(TASKS, 3, 0, {"protocol": None, "versions": {"mujoco": "3.3.0"}})


def played(key, success) -> PlayedEpisode:
    return PlayedEpisode(*key, 0, "greedy", success, 100 + key.init_state_id, 13, 1.5, None, None)


def results_in(folder, outcomes="110100", name="results.json", settings=SETTINGS) -> Results:
    """Episodes in the order of PLAN; `outcomes` has a 1 for each success."""
    episodes = [played(key, outcome == "1") for key, outcome in zip(PLAN.keys, outcomes, strict=False)]
    return Results(folder / name, settings, episodes)


def saved(results: Results, before=None) -> dict:
    save_results(results, PLAN, before)
    return json.loads(results.path.read_text())


def test_the_file_gives_back_every_episode(tmp_path):
    results = results_in(tmp_path)
    saved(results)
    again = open_results(results.path, SETTINGS, PLAN)
    assert again.episodes == results.episodes
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_file_has_k_n_and_interval_of_each_task_suite_and_all(tmp_path):
    stored = saved(results_in(tmp_path))
    goal = stored["suites"]["libero_goal"]
    assert (goal["tasks"]["0"]["success_k"], goal["tasks"]["1"]["success_k"]) == (1, 2)  # turns: 0 1 0 1 0 1
    assert (stored["all"]["success_low"], stored["all"]["success_high"]) == wilson_interval(3, 6)
    assert goal["success_n"] == 6
    assert stored["versions"] == {"mujoco": "3.3.0"}
    assert stored["complete"]


def test_an_unfinished_file_says_so_and_what_is_unplayed_has_no_rate(tmp_path):
    stored = saved(results_in(tmp_path, "1"))
    assert not stored["complete"]
    assert stored["suites"]["libero_goal"]["tasks"]["1"]["success_n"] == 0
    assert "success" not in stored["suites"]["libero_goal"]["tasks"]["1"]


def test_more_trials_may_follow_but_no_other_settings_tasks_or_weights(tmp_path):
    results = results_in(tmp_path)
    saved(results)
    assert len(open_results(results.path, SETTINGS, make_plan(TASKS, 50, 0, {})).episodes) == 6
    with pytest.raises(BadInput, match=r"weights \(file: abc, now: xyz\)"):
        open_results(results.path, replace(SETTINGS, weights="xyz"), PLAN)
    with pytest.raises(BadInput, match="holds 3 episodes of tasks"):
        open_results(results.path, SETTINGS, make_plan(TASKS[:1], 3, 0, {}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{half", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"format": "vla-grpo evaluation", "version": 2}', "version 2, this program reads 1"),
        ('{"format": "vla-grpo evaluation", "version": 1}', "damaged"),
        ('{"format": "vla-grpo evaluation", "version": 1, "settings": {}, "episodes": []}', "damaged"),
    ],
)
def test_a_file_of_something_else_is_refused_in_one_line_and_left_alone(tmp_path, content, said):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(BadInput, match=said) as caught:
        open_results(tmp_path / "results.json", SETTINGS, PLAN)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "results.json").read_text() == content


def test_a_missing_file_to_compare_with_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"--compare-with .*none\.json: cannot be read"):
        read_results(tmp_path / "none.json", "--compare-with")


def test_comparison_pairs_equal_episodes_only(tmp_path):
    before = results_in(tmp_path, "0100", "before.json")  # task 0: 0 0, task 1: 1 0
    stored = saved(results_in(tmp_path, "110100"), before)  # task 0: 1 0, task 1: 1 1 of those
    compared = stored["all"]["compared"]
    assert (compared["n"], compared["both"], compared["only_after"], compared["neither"]) == (4, 1, 2, 1)
    assert stored["suites"]["libero_goal"]["tasks"]["1"]["compared"]["only_after"] == 1
    assert stored["compared_with"]["file"].endswith("before.json")


@pytest.mark.parametrize(
    "other", [{"mode": "sample", "temperature": 1.0}, {"assets": "official"}, {"bddl_sha256": "1"}, {"mode": "sample"}]
)
def test_what_was_played_otherwise_is_not_compared(tmp_path, other):
    before = results_in(tmp_path, settings=replace(SETTINGS, **other))
    with pytest.raises(BadInput, match="--compare-with"):
        check_comparable(before, SETTINGS, PLAN)


def test_an_l1_head_is_compared_with_greedy_tokens_both_deterministic(tmp_path):
    check_comparable(results_in(tmp_path, settings=replace(SETTINGS, mode="l1")), SETTINGS, PLAN)


def test_files_without_a_common_episode_are_not_compared(tmp_path):
    with pytest.raises(BadInput, match="no episode"):
        check_comparable(results_in(tmp_path), SETTINGS, make_plan(TASKS, 3, 40, {}))


def test_the_table_has_a_line_per_task_and_a_sum(tmp_path):
    lines = results_table(results_in(tmp_path), PLAN)
    assert lines[1] == "libero_goal 0    1/3 = 33 % [6, 79]   do 0"
    assert lines[-1] == "libero_goal all  3/6 = 50 % [19, 81]"


def test_the_table_of_a_comparison_shows_difference_interval_and_pairs(tmp_path):
    lines = results_table(results_in(tmp_path), PLAN, results_in(tmp_path, "010000", "before.json"))
    assert lines[-1].endswith("+33 points [-17, +67], p = 0.5  6: +2 -0")
