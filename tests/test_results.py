"""Which episodes an evaluation plays, its results file, what may be compared, and its tables."""

import errno
import json
from pathlib import Path

import pytest

import eval as eval_program
from configs.eval_config import EvalConfig
from configs.sections import ModelConfig, SimulatorConfig
from contracts import BadInput
from envs.tasks import TaskInfo, suite_task
from experiment.eval_episodes import choose_mode, episode_of, settings_of
from experiment.results import EpisodeKey, Results, make_plan, open_results, save_results
from experiment.results_table import comparison_table, results_table
from experiment.statistics import Successes
from tests.fakes import CHUNK_LENGTH, FakePolicy, FakePool, Script
from tests.small_checkpoint import load_policy, make_small_checkpoint

SETTINGS = {
    "checkpoint": "runs/R/checkpoints/best",
    "weights": "abc",
    "mode": "greedy",
    "temperature": None,
    "seed": 0,
    "assets": "low-poly",
    "bddl_sha256": None,
    "device": "cpu",
    "frozen_weights": "float32",
}


def task(task_id=0, num_init_states=50) -> TaskInfo:
    return TaskInfo(task_id, f"task_{task_id}", f"do {task_id}", 300, num_init_states)


TASKS = {"libero_goal": [task(0), task(1)]}
PLAN = make_plan(TASKS, 3, 0, {"protocol": None, "versions": {"mujoco": "3.3.0"}})


def results_with(outcomes: str, path: Path, plan=PLAN, **settings) -> Results:
    """Results of the first episodes of the plan; `outcomes` has a 1 for each success, a 0 for each failure."""
    episodes = {
        key: {
            **key._asdict(),
            "seed": 0,
            "mode": "greedy",
            "success": outcome == "1",
            "env_steps": 100 + key.init_state_id,
            "decisions": 13,
            "seconds": 1.5,
            "error": None,
            "video": None,
        }
        for key, outcome in zip(plan.keys, outcomes, strict=False)
    }
    return Results(path, SETTINGS | settings, episodes)


@pytest.fixture
def results(tmp_path) -> Results:
    """Task 0: two of three succeed; task 1: one of three."""
    return results_with("110100", tmp_path / "results.json")


def saved(results: Results, before=None, plan=PLAN) -> dict:
    save_results(results, plan, before)
    return json.loads(results.path.read_text())


# the plan


def test_the_published_protocol_is_every_initial_state_of_every_task_once():
    keys = make_plan({"libero_goal": [task(i) for i in range(10)]}, 50, 0, {}).keys
    assert sorted(keys) == [EpisodeKey("libero_goal", i, state, 0) for i in range(10) for state in range(50)]


def test_only_a_policy_that_samples_plays_an_initial_state_again():
    tasks = {"libero_goal": [task(num_init_states=5)]}
    greedy = make_plan(tasks, 5, 3, {}).keys
    assert [(key.init_state_id, key.repeat) for key in greedy] == [(3, 0), (4, 0)]
    sampled = make_plan(tasks, 5, 3, {}, samples=True).keys
    assert [(key.init_state_id, key.repeat) for key in sampled] == [(3, 0), (4, 0), (3, 1), (4, 1), (3, 2)]
    with pytest.raises(BadInput, match="--first-init-state"):
        make_plan(tasks, 5, 5, {})


def test_fresh_states_do_not_end_and_each_has_its_own_seed():
    keys = make_plan({"libero_goal": [task(num_init_states=5)]}, 200, 2, {}, fresh=True).keys
    starts = [
        (episode.init_state_id, episode.seed) for episode in (episode_of(key, fresh=True) for key in keys)
    ]
    assert starts == [(None, seed) for seed in range(2, 202)]


def test_an_episode_keeps_its_random_stream_whatever_else_is_played():
    all_keys = make_plan({"libero_goal": [task(i) for i in range(90)]}, 120, 0, {}).keys
    indices = [episode_of(key).index for key in all_keys]
    assert len(set(indices)) == len(indices)
    (key,) = make_plan({"libero_goal": [task(7)]}, 1, 33, {}).keys
    assert episode_of(key).index == indices[all_keys.index(key)]


# how the policy decides


def test_an_adapter_decides_by_tokens_and_its_bases_l1_head_is_not_evaluated_under_its_name(small, tmp_path):
    policy = load_policy(small)
    policy.save_adapter(tmp_path)

    def mode_of(checkpoint, mode):
        return choose_mode(EvalConfig(ModelConfig(checkpoint=str(checkpoint)), mode=mode), policy)

    assert [mode_of(small, mode) for mode in ("auto", "l1", "greedy")] == ["l1", "l1", "greedy"]
    assert mode_of(tmp_path, "auto") == "greedy"
    with pytest.raises(BadInput, match=f"--checkpoint {small}"):
        mode_of(tmp_path, "l1")


def test_other_stored_states_of_ones_own_task_are_other_settings(small, tmp_path):
    bddl_file = tmp_path / "own.bddl"
    bddl_file.write_text(suite_task("libero_goal", 7).bddl.read_text())
    model = ModelConfig(checkpoint=str(small))
    config = EvalConfig(model, SimulatorConfig(assets="lowpoly", bddl_file=str(bddl_file)))
    policy = load_policy(small)
    hashes = [settings_of(config, policy)["init_states_sha256"]]
    for content in (b"some states", b"others"):
        (tmp_path / "own.pruned_init").write_bytes(content)
        hashes.append(settings_of(config, policy)["init_states_sha256"])
    assert hashes[0] is None
    assert len(set(hashes)) == 3


# the results file


def test_the_file_has_k_n_and_interval_of_each_task_suite_and_all(results):
    stored = saved(results)
    goal = stored["suites"]["libero_goal"]
    assert (goal["tasks"]["0"]["success_k"], goal["tasks"]["1"]["success_k"]) == (2, 1)
    assert (stored["all"]["success_low"], stored["all"]["success_high"]) == Successes(3, 6).interval
    assert goal["success_n"] == 6
    assert stored["versions"] == {"mujoco": "3.3.0"}
    assert stored["complete"]


def test_an_unfinished_file_says_so_and_what_is_unplayed_has_no_rate(tmp_path):
    stored = saved(results_with("1", tmp_path / "results.json"))
    assert not stored["complete"]
    unplayed = stored["suites"]["libero_goal"]["tasks"]["1"]
    assert unplayed["success_n"] == 0
    assert "success" not in unplayed


def test_more_trials_may_follow_but_no_other_settings_tasks_or_weights(results):
    saved(results)
    more_trials = make_plan(TASKS, 50, 0, {})
    assert open_results(results.path, SETTINGS, more_trials).episodes == results.episodes
    with pytest.raises(BadInput, match=r"weights \(file: abc, now: xyz\)"):
        open_results(results.path, SETTINGS | {"weights": "xyz"}, PLAN)
    # The file has no such fields, as files of older versions.
    for flag, value in (("max_env_steps", 50), ("unnorm_key", "libero_goal")):
        with pytest.raises(BadInput, match=rf"{flag} \(file: None, now: {value}\)"):
            open_results(results.path, SETTINGS | {flag: value}, PLAN)
    not_given = {"max_env_steps": None, "unnorm_key": None}
    assert open_results(results.path, SETTINGS | not_given, PLAN).episodes == results.episodes
    with pytest.raises(BadInput, match="holds 3 episodes"):
        open_results(results.path, SETTINGS, make_plan({"libero_goal": [task(0)]}, 3, 0, {}))


@pytest.mark.parametrize(
    "content",
    [
        "{half",
        '{"format": "vla-grpo evaluation", "version": 2}',
        '{"format": "vla-grpo evaluation", "version": 1}',
        '{"format": "vla-grpo evaluation", "version": 1, "settings": {}, "episodes": [{}]}',
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(BadInput, match=str(path)):
        open_results(path, SETTINGS, PLAN)
    assert path.read_text() == content


def test_a_results_file_that_does_not_fit_is_one_line(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BadInput, match=r"--out .*r\.json: .*\(No space left on device\)"):
        save_results(Results(tmp_path / "r.json", SETTINGS), PLAN)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_saves_all_episodes_that_have_ended(tmp_path):
    class InterruptedPool(FakePool):
        def step(self, slot, actions):
            if len(self.started) == 4:
                raise KeyboardInterrupt
            super().step(slot, actions)

    results = Results(tmp_path / "results.json", SETTINGS)
    pool = InterruptedPool(lambda *_: Script(CHUNK_LENGTH))
    with pytest.raises(KeyboardInterrupt):
        eval_program.play_and_save(EvalConfig(), FakePolicy(), pool, PLAN, PLAN.keys, results)
    assert open_results(results.path, SETTINGS, PLAN).episodes.keys() == set(PLAN.keys[:3])


# comparisons


@pytest.mark.parametrize(
    ("settings", "problem"),
    [({"mode": "l1"}, "no L1 action head"), ({"mode": "greedy"}, r"r-before\.json holds an evaluation")],
)
def test_what_is_wrong_with_the_other_checkpoint_is_found_before_the_first_one_plays(
    monkeypatch, small, tmp_path, settings, problem
):
    monkeypatch.setattr(eval_program, "play", lambda *_: pytest.fail("it plays"))
    other = make_small_checkpoint(tmp_path / "without_head")
    saved(results_with("1", tmp_path / "r-before.json"))
    model = ModelConfig(checkpoint=str(small), device="cpu")
    config = EvalConfig(model, SimulatorConfig(assets="lowpoly"), compare_with=str(other), **settings)
    with pytest.raises(BadInput, match=problem):
        eval_program.play_all(config, PLAN, tmp_path / "r.json")


def test_comparison_pairs_equal_episodes_only(results, tmp_path):
    before = results_with("0100", tmp_path / "before.json")
    stored = saved(results, before)
    compared = stored["all"]["compared"]
    assert (compared["n"], compared["both"], compared["only_after"], compared["neither"]) == (4, 1, 2, 1)
    assert stored["suites"]["libero_goal"]["tasks"]["1"]["compared"]["only_after"] == 1
    assert stored["compared_with"]["file"] == str(before.path)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "sample", "temperature": 1.0},
        {"assets": "official"},
        {"bddl_sha256": "1"},
        {"init_states_sha256": "1"},
        {"mode": "sample"},
        {"prompt": "leaked"},
        {"init_states": "fresh"},
        {"max_env_steps": 50},
        {"unnorm_key": "libero_goal"},
    ],
)
def test_what_was_played_otherwise_is_not_compared(tmp_path, settings):
    other = results_with("110100", tmp_path / "other.json", **settings)
    with pytest.raises(BadInput, match="--compare-with"):
        open_results(tmp_path / "x", SETTINGS, PLAN, other)


def test_two_deterministic_modes_are_compared_but_not_disjoint_episodes(tmp_path):
    other = results_with("110100", tmp_path / "other.json", mode="l1")
    assert open_results(tmp_path / "x", SETTINGS, PLAN, other).episodes == {}
    with pytest.raises(BadInput, match="in common"):
        open_results(tmp_path / "x", SETTINGS, make_plan(TASKS, 3, 20, {}), other)


# tables


def test_the_tables_have_a_line_for_each_task_and_for_all(results, tmp_path):
    lines = results_table(results, PLAN)
    assert lines[0].endswith("instruction; assets: low-poly")
    assert lines[1] == "libero_goal 0    2/3 = 67 % [21, 94]  do 0"
    assert lines[-1] == "libero_goal all  3/6 = 50 % [19, 81]"
    lines = comparison_table(results_with("010000", tmp_path / "before.json"), results, PLAN)
    assert lines[-1].endswith("+33 points [-17, +67], p = 0.5  6: +2 -0")
