"""The evaluations of a run: same states and random numbers every time, files, the baseline, the best checkpoint."""

from collections import Counter
from collections.abc import Iterator

import imageio.v2 as imageio
import numpy as np
import pytest
import torch

import experiment.evaluation
from configs.config import TrainConfig, changed
from configs.eval_config import EvalConfig
from configs.sections import ModelConfig
from contracts import BadInput, resolve_pointer
from eval import print_trained_states
from experiment.checkpoints import TrainerState, save_checkpoint
from experiment.episodes import EpisodeKey, Rule
from experiment.evaluation import (
    count_by_rule,
    evaluate_and_record,
    evaluation_is_due,
    metrics_of,
    play_evaluation,
    time_left,
)
from experiment.evaluator import Conditions, evaluate, write_video
from experiment.hopeless_runs import check_baseline, check_imitation
from experiment.results import read_results
from experiment.run_folder import Run
from experiment.statistics import Successes
from experiment.stored_run import CONFIG_FILE, METRICS_FILE, read_metrics
from rl.rollout import Rollout
from rl.update import Learner
from tests.fakes import FakePolicy, FakePool, Script, adamw, trajectory
from tests.stored_runs import evaluation, store

KEYS = [EpisodeKey("libero_spatial", 0, False, 40 + i) for i in range(4)]


# evaluate


def test_every_evaluation_draws_the_same_numbers():
    def entropies(seed: int, num_slots: int, keys=KEYS) -> list:
        pool = FakePool(lambda *_: Script(9), num_slots, order_seed=num_slots)
        torch.rand(7)  # history does not matter
        results = evaluate(FakePolicy(), pool, keys, Rule("sample", 1.0), Conditions(seed))
        return [result.entropy for result in results]

    assert entropies(0, 1) == entropies(0, 1) == entropies(0, 3)
    assert entropies(0, 1, KEYS[1:]) == entropies(0, 1)[1:]
    assert entropies(0, 1) != entropies(1, 1)


def test_an_episode_is_played_again_after_a_fault_and_left_out_where_its_state_cannot_be_played():
    pool = FakePool(lambda _, state: Script(9, success=True, faults={40: 1, 41: 99}.get(state, 0)))
    results = evaluate(FakePolicy(), pool, KEYS, Rule("sample", 0.5), Conditions(seed=0))
    assert [result.init_state_id for result in results] == [40, 42, 43]
    assert [result.error is not None for result in results] == [True, False, False]
    assert (results[0].key, results[0].rule) == (KEYS[0], Rule("sample", 0.5))
    assert (results[0].success, results[0].env_steps, results[0].decisions) == (True, 9, 3)
    assert 0 < results[0].entropy < np.log(256)
    with pytest.raises(RuntimeError, match="every episode"):
        evaluate(FakePolicy(), FakePool(lambda *_: Script(9, faults=99)), KEYS, Rule("greedy"), Conditions(0))


@pytest.mark.parametrize(("filmed", "names"), [("none", set()), ("first", {40}), ("failures", {41, 43})])
def test_videos_are_kept_of_the_chosen_episodes(tmp_path, filmed, names):
    pool = FakePool(lambda _, state: Script(9, success=state % 2 == 0))
    conditions = Conditions(seed=0, film=filmed, video_folder=tmp_path / "v")
    results = evaluate(FakePolicy(), pool, KEYS, Rule("greedy"), conditions)
    assert {result.init_state_id for result in results if result.video} == names
    assert all((tmp_path / "v" / result.video).is_file() for result in results if result.video)


def test_a_video_does_not_bring_back_a_run_folder_that_was_moved(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_video(tmp_path / "run" / "videos" / "video.mp4", [np.zeros((16, 16, 3), np.uint8)])


def test_a_video_has_every_frame_at_20_per_second(tmp_path):
    write_video(tmp_path / "video.mp4", [np.full((256, 256, 3), 20 * i, dtype=np.uint8) for i in range(12)])
    with imageio.get_reader(tmp_path / "video.mp4") as reader:
        assert [frame.mean() for frame in reader] == pytest.approx([20 * i for i in range(12)], abs=6)
        assert reader.get_meta_data()["fps"] == 20


# who plays


CONFIG = changed(
    TrainConfig(),
    assets="lowpoly",
    eval_init_states=(40, 50),
    warmup_steps=30,
    warmup_actor="teacher",
    n_steps=10,
    eval_interval=100,
    eval_trials=2,
    wandb_mode="disabled",
)
TWO_TASKS = changed(CONFIG, task_ids=(0, 1), eval_init_states=(40, 43))


def solvable_on_task_0() -> FakePool:
    return FakePool(lambda task_id, _: Script(9, success=task_id == 0))


def test_all_play_the_same_held_out_states_and_only_sampling_repeats_them(tmp_path):
    pool = solvable_on_task_0()
    policy = FakePolicy(adapter_scale=0.1)
    learner = Learner(policy, None, None)
    episodes = play_evaluation(TWO_TASKS, learner, pool, TrainerState(), tmp_path)
    # Teacher, greedy student and medians once, the sampled student twice.
    assert Counter(pool.started) == {(task, state): 5 for task in (0, 1) for state in (40, 41, 42)}
    rates = count_by_rule(episodes, TrainerState())
    assert rates["teacher"] == rates["greedy"] == rates["median"] == Successes(3, 6)
    assert rates["sampled"] == Successes(6, 12)
    metrics = metrics_of(rates, episodes)
    assert [metrics[f"eval/sampled_success_task_{task}"] for task in (0, 1)] == [1, 0]
    assert 0 < metrics["eval/entropy"] < np.log(256)
    modes = list(dict.fromkeys(mode for mode, _ in policy.modes))
    assert modes == ["student greedy", "student sample", "student median", "teacher greedy"]
    assert sum(result.video is not None for result in episodes) == 4


@pytest.mark.parametrize(
    ("scale", "mode", "num_episodes"),
    [(0.0, "greedy", 6), (0.1, "greedy", 12), (0.0, "l1", 12), (0.0, "median", 12)],
)
def test_a_student_that_still_equals_its_teacher_is_not_played_beside_it(tmp_path, scale, mode, num_episodes):
    pool = solvable_on_task_0()
    learner = Learner(FakePolicy(adapter_scale=scale), None, None, teacher_mode=mode)
    state = TrainerState(evaluated_at=0)  # so that the medians are not played
    config = changed(TWO_TASKS, eval_trials=0)
    episodes = play_evaluation(config, learner, pool, state, tmp_path)
    assert len(pool.started) == num_episodes
    rates = count_by_rule(episodes, state)
    assert rates == {"teacher": Successes(3, 6), "greedy": Successes(3, 6)}


# in a run


@pytest.fixture
def learner() -> Learner:
    policy = FakePolicy()
    return Learner(policy, None, adamw(policy))


@pytest.fixture
def run(tmp_path, monkeypatch) -> Iterator[Run]:
    monkeypatch.setattr(experiment.evaluation, "update_report", lambda folder: None)
    for name in ("checkpoints", "evaluations", "videos"):
        (tmp_path / name).mkdir()
    run = Run(tmp_path, CONFIG)
    yield run
    run.close()


def evaluate_at(step: int, run: Run, learner: Learner, state: TrainerState, successes: int) -> None:
    """Save a checkpoint and evaluate where `successes` of the ten held-out states succeed."""
    state.global_step = step
    save_checkpoint(run.checkpoints, learner, state, keep=9)
    pool = FakePool(lambda _, init_state: Script(8, success=init_state < 40 + successes))
    evaluate_and_record(CONFIG, run, learner, pool, state)


def test_evaluations_are_due_at_the_start_after_the_warmup_and_at_multiples_of_the_interval():
    def is_due(evaluated_at: int | None, global_step: int, config=CONFIG) -> bool:
        return evaluation_is_due(config, TrainerState(global_step, evaluated_at=evaluated_at))

    assert is_due(None, 0)
    assert [step for step in range(0, 100) if is_due(0, step)][:1] == [30]  # the warmup's end
    unjudged = changed(CONFIG, warmup_success_ratio=0.0)
    assert [step for step in range(0, 300) if is_due(0, step, unjudged)][:1] == [100]
    assert [step for step in range(0, 300) if is_due(30, step)][:1] == [100]
    assert [step for step in range(0, 300) if is_due(130, step)][:1] == [200]


@pytest.mark.parametrize(
    ("global_step", "seconds"),
    [
        (230, 7 * 300 + 2 * 30 * 3),  # seven updates of 12 env steps, evaluations at 300 and 310
        (310, 30 * 3),  # the last evaluation
    ],
)
def test_the_time_left_counts_updates_and_evaluations(global_step, seconds):
    state = TrainerState(global_step, evaluated_at=global_step - 10)
    rollout = Rollout([trajectory(2), trajectory(1)], {}, wall_s=40.0, errors=0)
    config = changed(CONFIG, total_steps=310)
    assert time_left(config, state, rollout, update_s=300, episode_s=3) == pytest.approx(seconds)


def test_an_evaluation_is_recorded_filmed_and_remembered(run, learner):
    state = TrainerState(updates_done=3)
    evaluate_at(120, run, learner, state, successes=7)
    (row,) = read_metrics(run.folder / METRICS_FILE)
    assert (row["global_step"], row["update"]) == (120, 3)
    assert row["eval/greedy_success"] == row["eval/teacher_success"] == 0.7
    assert row["time/eval"] > 0
    videos = {path.name for path in (run.folder / "videos" / "step_120").iterdir()}
    start = "libero_spatial-task_0-init_state_40"
    assert videos == {f"{start}-{rule}-success.mp4" for rule in ("greedy", "sampled_1", "median")}
    assert (state.evaluated_at, state.teacher) == (120, (7, 10))
    assert not evaluation_is_due(CONFIG, state)
    results = read_results(run.folder / "evaluations" / "step_120.json")
    assert results.settings.checkpoint == str(run.checkpoints / "step_120")
    successes = Counter(result.rule.name for result in results.episodes if result.success)
    assert successes == {"teacher": 7, "greedy": 7, "sampled": 14, "median": 7}


def test_the_best_is_the_first_with_the_highest_success_rate(run, learner):
    state = TrainerState()
    best = []
    for step, successes in ((0, 5), (100, 8), (200, 6), (250, 8), (300, 9)):
        evaluate_at(step, run, learner, state, successes)
        best.append(resolve_pointer(run.checkpoints / "best").name)
    assert best == ["step_0", "step_100", "step_100", "step_100", "step_300"]
    assert state.teacher == (5, 10)  # it has played once


# baseline


@pytest.mark.parametrize(
    ("phases", "judged"),
    [
        ({"warmup_steps": 30}, "teacher"),
        ({"warmup_steps": 0, "transition_steps": 100}, "teacher"),  # which acts first: epsilon starts at 1
        ({"warmup": False}, "sampled"),
    ],
)
def test_a_hopeless_policy_stops_a_run_that_it_begins(phases, judged):
    def check(k: int, others: int, allow: bool = False) -> None:
        rules = ("teacher", "greedy", "sampled")
        rates = {rule: Successes(k if rule == judged else others, 10) for rule in rules}
        check_baseline(changed(CONFIG, allow_zero_baseline=allow, **phases), rates)

    with pytest.raises(BadInput, match=r"--allow-zero-baseline"):
        check(0, others=9)
    check(1, others=0)
    check(0, others=0, allow=True)


def test_a_run_stops_after_a_warmup_in_which_the_student_did_not_learn_to_imitate():
    def check(student: int, share: float) -> None:
        phases = changed(CONFIG, warmup_success_ratio=share).phases
        check_imitation(phases, {"teacher": Successes(33, 50), "greedy": Successes(student, 50)})

    with pytest.raises(BadInput, match="--warmup-success-ratio"):
        check(5, 0.5)  # its interval ends at 21 %
    check(10, 0.5)  # at 33 %
    check(5, 0.0)


def test_the_student_is_compared_with_its_teacher_after_the_warmup_alone(run, learner):
    state = TrainerState(evaluated_at=0, teacher=(9, 10))
    with pytest.raises(BadInput, match="--warmup-success-ratio"):
        evaluate_at(35, run, learner, state, successes=0)
    assert state.evaluated_at == 0  # a resumed run compares them again
    state.evaluated_at = 35
    evaluate_at(101, run, learner, state, successes=0)


# eval.py


def test_states_that_a_run_has_trained_on_are_named_once(tmp_path, monkeypatch, capsys):
    states = {"task__train_init_states": (0, 40), "task__eval_init_states": (40, 50)}
    run = store(tmp_path / "run", [evaluation(0)], model__checkpoint="checkpoints/tiny", **states)
    checkpoint = run / "checkpoints" / "step_0"
    checkpoint.mkdir(parents=True)
    (checkpoint / "adapter_config.json").touch()
    monkeypatch.chdir(run)  # where the name of the start looks as if the run had written it
    config = EvalConfig(model=ModelConfig(checkpoint="checkpoints/step_0"))
    print_trained_states(config, dict.fromkeys([KEYS[0]], "an instruction"))
    assert capsys.readouterr().out == ""
    print_trained_states(config, {KEYS[0]._replace(init_state_id=39): "an instruction"})
    assert capsys.readouterr().out.count("was trained on the official initial states (0, 40)") == 1
    (run / CONFIG_FILE).write_text("{}")  # as of another version
    print_trained_states(config, {})
    assert "it is unknown whether" in capsys.readouterr().out
