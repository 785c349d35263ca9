"""Which episodes eval.py plays, by which modes, its results file, what may be compared, and its tables."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from configs.eval_config import EvalConfig
from configs.sections import ModelConfig, SimulatorConfig
from contracts import BadInput
from envs.env import TaskInfo
from eval import check_comparison, choose_rules, missing_episodes, play_missing, task_keys
from experiment.episodes import EpisodeKey, Rule
from experiment.policies import model_before
from experiment.results import (
    FREE_IN_COMPARISONS,
    Results,
    open_results,
    read_results,
    refuse_differences,
    settings_of,
    write_results,
)
from experiment.results_table import comparison_table
from tests.fakes import CHUNK_LENGTH, FakePolicy, FakePool, Script
from tests.small_checkpoint import load_policy
from tests.stored_runs import SETTINGS, episode

GREEDY = Rule("greedy")
SAMPLED = Rule("sample", 0.6)


def keys_of(num_tasks: int, num_init_states: int = 50, **settings) -> list[EpisodeKey]:
    config = EvalConfig(**settings)
    tasks = [TaskInfo(i, f"task_{i}", f"do {i}", 300, num_init_states) for i in range(num_tasks)]
    return [key for task in tasks for key in task_keys(config, "libero_goal", task)]


KEYS = keys_of(2, trials=3)
PLAN = {key: f"do {key.task_id}" for key in KEYS}


def results_with(outcomes: str, rule: Rule = GREEDY, **settings) -> Results:
    """Results of the first episodes of the plan; `outcomes` has a 1 for each success, a 0 for each failure."""
    episodes = [episode(key, rule, outcome == "1") for key, outcome in zip(KEYS, outcomes, strict=False)]
    return Results(replace(SETTINGS, **settings), {}, episodes)


# the plan


def test_every_initial_state_of_every_task_is_played_once_and_the_first_one_can_be_chosen():
    assert keys_of(10) == [EpisodeKey("libero_goal", i, False, n) for i in range(10) for n in range(50)]
    keys = keys_of(1, num_init_states=5, trials=5, first_init_state=3)
    assert [key.init_state_id for key in keys] == [3, 4]
    with pytest.raises(BadInput, match="--first-init-state"):
        keys_of(1, num_init_states=5, first_init_state=5)


def test_official_and_fresh_states_are_played_by_one_command():
    keys = keys_of(1, trials=200, init_states="both")
    episodes = [key.episode for key in keys]
    assert [episode.init_state_id for episode in episodes] == [*range(50), *[None] * 150]
    assert [episode.seed for episode in episodes[50:]] == list(range(150))
    fresh = keys_of(1, trials=200, init_states="fresh")
    assert set(keys[50:]) < set(fresh)  # so that the two commands' results can be compared
    assert len({key.episode.index for key in {*keys, *fresh}}) == 250


def test_an_episode_keeps_its_random_stream_whatever_else_is_played():
    all_keys = keys_of(90, trials=120)
    indices = [key.episode.index for key in all_keys]
    assert len(set(indices)) == len(indices)
    key = EpisodeKey("libero_goal", 7, False, 33)
    assert key.episode.index == indices[all_keys.index(key)]


def test_only_what_a_mode_has_not_played_is_played():
    results = results_with("110")
    missing = missing_episodes(PLAN, "libero_goal", [GREEDY, SAMPLED], results)
    assert missing == {GREEDY: KEYS[3:], SAMPLED: KEYS}
    assert missing_episodes(dict.fromkeys(KEYS[:3], ""), "libero_goal", [GREEDY], results) == {}


def test_an_adapter_decides_by_tokens_and_its_bases_l1_head_is_not_evaluated_under_its_name(small, tmp_path):
    load_policy(small).save_adapter(tmp_path)

    def modes_of(checkpoint, *mode):
        config = EvalConfig(ModelConfig(checkpoint=str(checkpoint)), mode=mode or None)
        return [rule.mode for rule in choose_rules(config, load_policy(checkpoint))]

    assert modes_of(small) == ["l1"]
    assert modes_of(small, "l1", "sample") == ["l1", "sample"]
    assert modes_of(tmp_path) == ["greedy"]
    with pytest.raises(BadInput, match=f"--checkpoint {small}"):
        modes_of(tmp_path, "l1")
    load_policy(small, l1_student="laplace").save_adapter(tmp_path / "laplace")
    assert modes_of(tmp_path / "laplace") == ["greedy"]  # as in its run
    assert modes_of(tmp_path / "laplace", "l1") == ["l1"]


# the results file


@pytest.mark.parametrize(
    ("setting", "value", "may_be_compared"),
    [
        ("weights", "xyz", True),
        ("seed", 1, True),
        ("unnorm_key", "mine", True),
        ("num_images", 2, True),
        ("assets", "official", False),
        ("simulator", "2", False),
    ],
)
def test_results_go_on_with_equal_settings_and_are_compared_with_those_of_another_policy(
    tmp_path, setting, value, may_be_compared
):
    path = tmp_path / "results.json"
    results = results_with("110100")
    write_results(path, results)
    assert open_results(path, SETTINGS, {}).results == results == read_results(path)
    changed = replace(SETTINGS, **{setting: value})
    with pytest.raises(BadInput, match=f"{setting} is "):
        open_results(path, changed, {})
    refused = nullcontext() if may_be_compared else pytest.raises(BadInput, match="--compare-with")
    with refused:
        refuse_differences("--compare-with", SETTINGS, changed, FREE_IN_COMPARISONS)


def test_results_whose_number_of_images_is_unknown_go_on():
    refuse_differences("--out", replace(SETTINGS, num_images=None), SETTINGS)


def test_a_start_is_compared_as_it_was_in_the_training_of_the_adapter(small_one_image, small, tmp_path):
    given = {"num_images": 2, "unnorm_key": "libero_goal_no_noops"}
    adapter = tmp_path / "adapter"
    load_policy(small_one_image, **given).save_adapter(adapter)
    trained = ModelConfig(str(adapter))
    assert model_before(trained, str(small_one_image)) == ModelConfig(str(small_one_image), **given)
    for other in (small, adapter):
        assert model_before(trained, str(other)) == ModelConfig(str(other))
    flagged = replace(trained, num_images=1)
    assert model_before(flagged, str(small_one_image)).num_images == 1


def test_the_number_of_images_of_a_policy_is_recorded():
    settings = settings_of(ModelConfig("policy"), SimulatorConfig(assets="lowpoly"), FakePolicy(), seed=0)
    assert settings.num_images == FakePolicy.num_images


def test_a_comparison_without_pairs_or_with_other_images_is_told_before_it_is_played(capsys):
    before = results_with("11", GREEDY, num_images=1)
    after = replace(SETTINGS, num_images=2)
    # A rule alone is compared with every other.
    check_comparison("--compare-with", before, after, PLAN, [SAMPLED])
    assert "reads 1 image(s), this one 2" in "".join(capsys.readouterr())
    before.episodes += results_with("11", Rule("sample", 1.6)).episodes
    check_comparison("--compare-with", before, after, PLAN, [SAMPLED, GREEDY])
    with pytest.raises(BadInput, match=r"greedy; sampled, T = 1\.6\) than these \(sampled, T = 0\.6\)"):
        check_comparison("--compare-with", before, after, PLAN, [SAMPLED])


def test_an_interrupt_saves_all_episodes_that_have_ended(tmp_path):
    class InterruptedPool(FakePool):
        def step(self, slot, actions):
            if len(self.started) == 4:
                raise KeyboardInterrupt
            super().step(slot, actions)

    file = open_results(tmp_path / "results.json", SETTINGS, {})
    pool = InterruptedPool(lambda *_: Script(CHUNK_LENGTH))
    with pytest.raises(KeyboardInterrupt):
        play_missing(EvalConfig(), FakePolicy(), pool, {GREEDY: KEYS}, file)
    assert read_results(file.path).outcomes(GREEDY).keys() == set(KEYS[:3])


# tables


def test_the_same_episodes_of_the_same_mode_are_compared():
    before = results_with("0100")
    before.episodes += results_with("1111", SAMPLED).episodes
    after = results_with("110100")
    after.episodes += results_with("1110", SAMPLED).episodes
    lines = comparison_table(before, after, [GREEDY, SAMPLED], PLAN)
    assert "1/4 = 25 % [5, 70]" in lines[-2]
    assert lines[-2].endswith("4: +2 -0")
    assert lines[-1].endswith("4: +0 -1")


def test_an_l1_head_is_compared_with_every_mode():
    lines = comparison_table(results_with("110100", Rule("l1")), results_with("0"), [GREEDY], PLAN)
    assert "l1 -> greedy" in lines[-1]
    assert lines[-1].endswith("1: +0 -1")
