"""What an evaluation leaves beside its record, and that none of it can end a run."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from configs.config import RunConfig, TaskConfig, TrainConfig
from rl import evaluation_files
from rl.evaluation import Successes, Validation, validate
from rl.evaluation_files import outcomes_of, read_episodes, write_evaluation
from rl.trajectory import Episode, Trajectory
from tests.fakes import FakePolicy, FakePool, Script, trajectory


def played(*successes: bool) -> list[Trajectory]:
    """Episodes of which the first was filmed; two initial states in turn."""
    episodes = [
        Trajectory(Episode(i, 0, 40 + i % 2, i), trajectory(2).decisions, success, 8)
        for i, success in enumerate(successes)
    ]
    episodes[0].frames = [np.full((32, 32, 3), 20 * i, np.uint8) for i in range(9)]
    return episodes


def validation() -> Validation:
    return Validation(
        Successes(1, 2), Successes(1, 2), Successes(3, 4),
        {"student": played(True, False), "student_sampled": played(True, True, False, True)},
    )  # fmt: skip


def run_in(folder, shown, rerun=False):
    return SimpleNamespace(
        folder=folder, config=TrainConfig(run=RunConfig(rerun=rerun)), show=lambda *given: shown.append(given)
    )


def test_every_episode_is_kept_with_task_state_trial_and_outcome(tmp_path):
    write_evaluation(run_in(tmp_path, []), 120, validation(), FakePolicy())
    kept = read_episodes(tmp_path, 120)
    assert [(e["init_state_id"], e["trial"], e["success"]) for e in kept["student_sampled"]] == [
        (40, 0, True), (41, 0, True), (40, 1, False), (41, 1, True)
    ]  # fmt: skip
    assert kept["student"] == outcomes_of(played(True, False))
    assert read_episodes(tmp_path, 121) == {}


def test_filmed_episodes_become_videos_and_are_shown(tmp_path):
    shown = []
    write_evaluation(run_in(tmp_path, shown), 120, validation(), FakePolicy())
    names = [name for name, *_ in shown]
    assert "video/student" in names
    for _, path, step, caption in shown:
        assert path.stat().st_size > 0
        assert step == 120
        assert caption == "task 0, initial state 40: success after 8 env steps"


def test_a_second_evaluation_at_the_same_step_replaces_the_first(tmp_path):
    write_evaluation(run_in(tmp_path, []), 120, validation(), FakePolicy())
    again = Validation(Successes(0, 2), Successes(0, 2), Successes(0, 2), {"student": played(False, False)})
    write_evaluation(run_in(tmp_path, []), 120, again, FakePolicy())
    assert [e["success"] for e in read_episodes(tmp_path, 120)["student"]] == [False, False]


@pytest.mark.parametrize("what", ["write_json", "write_video", "write_recording"])
def test_a_failure_costs_the_file_and_one_line(tmp_path, monkeypatch, caplog, what):
    def broken(*_, **__):
        raise OSError("no space left on device\nreally")

    monkeypatch.setattr(evaluation_files, "write_recording", lambda *_: None)
    monkeypatch.setattr(evaluation_files, what, broken)
    one_film = Validation(Successes(1, 2), Successes(1, 2), Successes(3, 4), {"student": played(True)})
    write_evaluation(run_in(tmp_path, [], rerun=True), 120, one_film, FakePolicy())
    (line,) = caplog.messages
    assert "could not be written (no space left on device)" in line
    assert "\n" not in line


def test_only_filmed_episodes_keep_what_was_seen():
    config = TrainConfig(task=TaskConfig(eval_init_states=(40, 43)))
    pool = FakePool(lambda *_: Script(9))
    filmed, *others = validate(FakePolicy(), pool, config, "greedy", Successes(1, 1)).played["student"]
    # The fake simulator's reset films nothing, so its first decision is not known to belong to a filmed episode.
    assert all(d.observation is not None for d in filmed.decisions[1:])
    assert all(d.observation is None for t in others for d in t.decisions)


def test_outcomes_are_plain_data():
    assert json.loads(json.dumps(outcomes_of(played(True)))) == outcomes_of(played(True))
