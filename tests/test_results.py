"""Intervals against published values, paired comparisons, which episodes an evaluation plays, and its results file."""

import errno
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import BadInput
from envs.tasks import TaskInfo
from eval import episode_of
from experiment.results import EpisodeKey, Results, make_plan, open_results, save_results
from experiment.results_table import comparison_table, perturbation_table, results_table
from experiment.robustness import draw_perturbations
from experiment.statistics import Paired, Successes, count_successes

# success rates


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
    assert Successes(k, n).interval == pytest.approx((low, high), abs=6e-5)


def test_no_success_has_a_lower_bound_of_exactly_0_and_no_failure_an_upper_one_of_exactly_1():
    # Else a perfect evaluation lies "below" an equally perfect baseline.
    ends = [(Successes(0, n).interval[0], Successes(n, n).interval[1]) for n in range(1, 101)]
    assert set(ends) == {(0.0, 1.0)}


def test_successes_are_counted_and_reported_with_k_n_and_interval():
    successes = count_successes(i < 8 for i in range(10))
    assert successes == Successes(8, 10)
    assert successes.metrics("eval/x") == pytest.approx(
        {"eval/x": 0.8, "eval/x_k": 8, "eval/x_n": 10, "eval/x_low": 0.4902, "eval/x_high": 0.9433}, abs=1e-4
    )
    assert str(successes) == "8/10 = 80 % [49, 94]"


# paired comparisons

cells = st.integers(0, 60)


def test_interval_has_the_published_value():
    # R package contingencytables, Newcombe_square_and_add_CI_paired_2x2 on its table cavo_2012, value of its own test.
    assert Paired(59, 16, 6, 80).interval == pytest.approx((-0.1186, -0.0046), abs=6e-5)


@given(both=cells, lost=cells, won=cells, neither=st.integers(1, 60))
def test_interval_contains_the_difference_and_changes_sign_with_the_order(both, lost, won, neither):
    pairs = Paired(both, lost, won, neither)
    low, high = pairs.interval
    assert -1 <= low <= pairs.difference + 1e-12
    assert pairs.difference - 1e-12 <= high <= 1
    assert Paired(both, won, lost, neither).interval == pytest.approx((-high, -low))


@given(won=st.integers(0, 40), lost=st.integers(0, 40), agreed=st.integers(0, 40))
def test_p_value_is_the_binomial_sum(won, lost, agreed):
    decided, fewer = won + lost, min(won, lost)
    tail = sum(math.comb(decided, k) for k in range(fewer + 1)) / 2**decided
    assert Paired(agreed, lost, won, agreed).p_value == pytest.approx(min(1.0, 2 * tail))


def test_a_gain_is_shown_in_points_with_interval_and_p_value():
    assert str(Paired(both=20, only_before=2, only_after=12, neither=16)) == "+20 points [+6, +33], p = 0.013"


# the plan


def task(task_id=0, states=50) -> TaskInfo:
    return TaskInfo(task_id, "name", "do it", 300, states)


def test_the_published_protocol_is_every_initial_state_of_every_task_once():
    keys = make_plan({"libero_goal": [task(i) for i in range(10)]}, 50, 0, {}).keys
    assert sorted(keys) == [EpisodeKey("libero_goal", i, state, 0) for i in range(10) for state in range(50)]
    tasks = {"libero_goal": [task(states=5)]}
    assert len(make_plan(tasks, 5, 3, {}).keys) == 2  # a greedy policy would repeat itself
    keys = make_plan(tasks, 5, 3, {}, samples=True).keys  # more trials than states: from the first again
    assert [(key.init_state_id, key.repeat) for key in keys] == [(3, 0), (4, 0), (3, 1), (4, 1), (3, 2)]


def test_an_episode_keeps_its_random_stream_whatever_else_is_played():
    all_keys = make_plan({"libero_goal": [task(i) for i in range(90)]}, 120, 0, {}).keys
    indices = [episode_of(key).index for key in all_keys]
    assert len(set(indices)) == len(indices)
    (alone,) = make_plan({"libero_goal": [task(7)]}, 1, 33, {}).keys
    assert alone in all_keys
    assert episode_of(alone).index == indices[all_keys.index(alone)]


# the results file

SETTINGS = {
    "checkpoint": "runs/R/checkpoints/best", "weights": "abc", "mode": "greedy", "temperature": None, "seed": 0,
    "assets": "low-poly", "bddl_sha256": None, "device": "cpu", "frozen_weights": "float32",
}  # fmt: skip
TASKS = {"libero_goal": [TaskInfo(i, f"task_{i}", f"do {i}", 300, 50) for i in range(2)]}
PLAN = make_plan(TASKS, 3, 0, {"protocol": None, "versions": {"mujoco": "3.3.0"}})


def results_in(folder, outcomes="110100", name="results.json", **settings) -> Results:
    """Episodes in the order of PLAN; `outcomes` has a 1 for each success."""
    episodes = {
        key: {**key._asdict(), "success": outcome == "1", "env_steps": 100 + key.init_state_id}
        for key, outcome in zip(PLAN.keys, outcomes, strict=False)
    }
    return Results(folder / name, SETTINGS | settings, episodes)


def saved(results: Results, before=None) -> dict:
    save_results(results, PLAN, before)
    return json.loads(results.path.read_text())


def test_the_file_has_k_n_and_interval_of_each_task_suite_and_all(tmp_path):
    stored = saved(results_in(tmp_path))
    goal = stored["suites"]["libero_goal"]
    assert (goal["tasks"]["0"]["success_k"], goal["tasks"]["1"]["success_k"]) == (2, 1)
    assert (stored["all"]["success_low"], stored["all"]["success_high"]) == Successes(3, 6).interval
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
    assert open_results(results.path, SETTINGS, make_plan(TASKS, 50, 0, {})).episodes == results.episodes
    with pytest.raises(BadInput, match=r"weights \(file: abc, now: xyz\)"):
        open_results(results.path, SETTINGS | {"weights": "xyz"}, PLAN)
    with pytest.raises(BadInput, match="holds 3 episodes that"):
        open_results(results.path, SETTINGS, make_plan({"libero_goal": TASKS["libero_goal"][:1]}, 3, 0, {}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{half", "is no JSON"),
        ('{"format": "vla-grpo evaluation", "version": 2}', "no results file of eval.py, version 1"),
        ('{"format": "vla-grpo evaluation", "version": 1}', "damaged"),
        ('{"format": "vla-grpo evaluation", "version": 1, "settings": {}, "episodes": [{}]}', "damaged"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, content, said):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(BadInput, match=said):
        open_results(tmp_path / "results.json", SETTINGS, PLAN)
    assert (tmp_path / "results.json").read_text() == content


def test_comparison_pairs_equal_episodes_only(tmp_path):
    before = results_in(tmp_path, "0100", "before.json")  # task 0: 0 1 0, task 1: 0
    stored = saved(results_in(tmp_path, "110100"), before)  # task 0: 1 1 0, task 1: 1 of those
    compared = stored["all"]["compared"]
    assert (compared["n"], compared["both"], compared["only_after"], compared["neither"]) == (4, 1, 2, 1)
    assert stored["suites"]["libero_goal"]["tasks"]["1"]["compared"]["only_after"] == 1
    assert stored["compared_with"]["file"].endswith("before.json")


@pytest.mark.parametrize(
    "other",
    [
        {"mode": "sample", "temperature": 1.0},
        {"assets": "official"},
        {"bddl_sha256": "1"},
        {"mode": "sample"},
    ],
)
def test_what_was_played_otherwise_is_not_compared(tmp_path, other):
    before = results_in(tmp_path, **other)
    with pytest.raises(BadInput, match="--compare-with"):
        open_results(tmp_path / "x", SETTINGS, PLAN, before)
    both_deterministic = results_in(tmp_path, mode="l1")
    assert open_results(tmp_path / "x", SETTINGS, PLAN, both_deterministic).episodes == {}


def test_the_table_has_a_line_per_task_and_a_sum_and_differences_with_interval_and_pairs(tmp_path):
    lines = results_table(results_in(tmp_path), PLAN)
    assert lines[0].endswith("instruction; assets: low-poly")
    assert lines[1] == "libero_goal 0    2/3 = 67 % [21, 94]  do 0"
    assert lines[-1] == "libero_goal all  3/6 = 50 % [19, 81]"
    lines = comparison_table(results_in(tmp_path, "010000", "before.json"), results_in(tmp_path), PLAN)
    assert lines[-1].endswith("+33 points [-17, +67], p = 0.5  6: +2 -0")


def test_a_results_file_that_does_not_fit_is_one_line(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BadInput, match=r"--out .*r\.json: cannot be written \(No space left on device\)"):
        save_results(Results(tmp_path / "r.json", SETTINGS), PLAN)
    assert list(tmp_path.iterdir()) == []


def test_perturbed_episodes_stand_apart_and_are_paired_with_the_same_starts_unperturbed(tmp_path):
    plan = make_plan({"libero_goal": [task(0)]}, 2, 0, {}, ["camera-1", "camera-5"])
    assert [key.perturbation for key in plan.keys] == [
        "none",
        "none",
        "camera-1",
        "camera-1",
        "camera-5",
        "camera-5",
    ]
    outcomes = dict(zip(plan.keys, (True, True, True, False, False, False), strict=True))
    episodes = {key: {**key._asdict(), "success": won} for key, won in outcomes.items()}
    results = Results(tmp_path / "results.json", SETTINGS, episodes)
    save_results(results, plan)
    stored = json.loads(results.path.read_text())
    assert stored["all"]["success_k"] == stored["all"]["success_n"] == 2  # the unperturbed alone
    camera = stored["perturbed"]["camera-5"]
    assert (camera["success_k"], camera["against_unperturbed"]["only_before"]) == (0, 2)
    assert open_results(results.path, SETTINGS, plan).episodes == episodes
    lines = perturbation_table(results, plan.perturbations, results)
    assert lines[2].startswith("camera-1      1/2 = 50 % [9, 91]")
    assert len(lines) == 4
    assert (
        draw_perturbations(results, plan.perturbations, results, tmp_path / "picture.png").stat().st_size
        > 1000
    )
    assert len({episode_of(key).index for key in plan.keys}) == 6
    assert (
        len({episode_of(key).perturbation.seed for key in plan.keys if key.perturbation != "none"}) == 2
    )  # by state
