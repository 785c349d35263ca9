"""`eval.py` on the real simulator, episodes of 16 env steps: results, comparison, videos, going on after a kill."""

import json

import pytest

import eval as eval_program
from envs.tasks import MAX_ENV_STEPS, libero_root
from errors import BadInput


@pytest.fixture(autouse=True)
def _short_episodes(monkeypatch):
    for suite in MAX_ENV_STEPS:
        monkeypatch.setitem(MAX_ENV_STEPS, suite, 16)


@pytest.fixture
def flags(checkpoint) -> list[str]:
    return ["--checkpoint", checkpoint, "--device", "cpu", "--task-id", "0", "--trials", "2"]


def stored(path) -> dict:
    return json.loads(path.read_text())


def outcomes(path) -> list[dict]:
    """Episodes without what may differ between two evaluations of the same."""
    return [{k: v for k, v in episode.items() if k != "seconds"} for episode in stored(path)["episodes"]]


class Killed(BaseException):
    """As sudden as a SIGKILL: nobody handles it."""


def test_killed_evaluation_goes_on_and_equals_the_straight_one(flags, tmp_path, monkeypatch):
    sampled = [*flags, "--mode", "sample", "--task-ids", "0", "1"]
    straight, killed = tmp_path / "straight.json", tmp_path / "killed.json"
    eval_program.main([*sampled, "--out", str(straight)])

    save, calls = eval_program.save_results, []

    def dying(*args):
        calls.append(1)
        if len(calls) == 4:  # the empty file, two episodes, and then the third
            raise Killed
        save(*args)

    with monkeypatch.context() as patch:
        patch.setattr(eval_program, "save_results", dying)
        with pytest.raises(Killed):
            eval_program.main([*sampled, "--out", str(killed)])
    assert len(outcomes(killed)) == 2
    assert not stored(killed)["complete"]

    played = []
    evaluate = eval_program.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(eval_program, "evaluate", lambda p, q, e, *r, **k: played.extend(e) or evaluate(p, q, e, *r, **k))
        eval_program.main([*sampled, "--out", str(killed)])
    assert len(played) == 2
    assert outcomes(killed) == outcomes(straight)
    assert stored(killed)["complete"]
    assert stored(killed)["versions"]["mujoco"] == "3.3.0"


def test_comparison_videos_and_table(flags, tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    eval_program.main([*flags, "--out", str(first), "--video", "failures"])
    videos = [episode["video"] for episode in outcomes(first)]
    assert videos == [f"first-videos/libero_spatial-task_0-init_state_{i}-failure.mp4" for i in range(2)]
    assert all((tmp_path / video).stat().st_size > 0 for video in videos)

    eval_program.main([*flags, "--out", str(second), "--compare-with", str(first), "--trials", "1"])
    assert stored(second)["all"]["compared"]["n"] == 1
    assert "libero_spatial all  0/1 = 0 % [0, 79]" in capsys.readouterr().out

    with pytest.raises(BadInput, match="with temperature None, this with 1"):
        eval_program.main([*flags, "--out", str(tmp_path / "x.json"), "--compare-with", str(first), "--mode", "sample"])
    assert not (tmp_path / "x.json").exists()


def test_a_checkpoint_to_compare_with_gets_a_results_file_of_its_own(flags, checkpoint, tmp_path):
    eval_program.main([*flags, "--trials", "1", "--out", str(tmp_path / "r.json"), "--compare-with", checkpoint])
    assert stored(tmp_path / "r-before.json")["complete"]
    assert stored(tmp_path / "r.json")["compared_with"]["file"] == str(tmp_path / "r-before.json")


def test_a_task_of_ones_own_is_evaluated_with_its_own_instruction(flags, tmp_path):
    original = libero_root() / "bddl_files" / "libero_goal" / "turn_on_the_stove.bddl"
    own = tmp_path / "light_it.bddl"
    own.write_text(
        original.read_text().replace("Turn on the stove", "light the stove").replace("turn on the", "light the")
    )
    argv = [flag for flag in flags if flag not in ("--task-id", "0")]
    eval_program.main([*argv, "--bddl-file", str(own), "--trials", "1", "--out", str(tmp_path / "own.json")])
    task = stored(tmp_path / "own.json")["suites"]["libero_spatial"]["tasks"]["0"]
    assert (task["name"], task["instruction"]) == ("light_it", "light the stove")
    assert stored(tmp_path / "own.json")["settings"]["bddl_sha256"]
