"""`eval.py` on the real simulator, episodes of 16 env steps: results, comparison, videos, going on after a kill."""

import json

import pytest

import eval as eval_program
from configs.presets import TINY_CHECKPOINT
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
    sampled = [*flags, "--mode", "sample", "--trials", "3"]
    straight, killed = tmp_path / "straight.json", tmp_path / "killed.json"
    eval_program.main([*sampled, "--out", str(straight)])

    save, calls = eval_program.save_results, []

    def dying(*args):
        calls.append(1)
        if len(calls) == 3:  # the empty file, one episode, and then the second
            raise Killed
        save(*args)

    with monkeypatch.context() as patch:
        patch.setattr(eval_program, "save_results", dying)
        with pytest.raises(Killed):
            eval_program.main([*sampled, "--out", str(killed)])
    assert len(outcomes(killed)) == 1
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


def test_comparison_videos_and_table(flags, checkpoint, tmp_path, capsys):
    after, before = tmp_path / "r.json", tmp_path / "r-before.json"
    eval_program.main([*flags, "--out", str(after), "--compare-with", checkpoint, "--video", "failures"])
    assert stored(before)["complete"]
    assert stored(after)["compared_with"]["file"] == str(before)
    assert stored(after)["all"]["compared"]["n"] == 2
    videos = [episode["video"] for episode in outcomes(after)]
    assert videos == [f"r-videos/libero_spatial-task_0-init_state_{i}-failure.mp4" for i in range(2)]
    assert all((tmp_path / video).stat().st_size > 0 for video in videos)
    shown = capsys.readouterr().out
    assert "libero_spatial all  0/2 = 0 % [0, 66]" in shown
    assert "+0 points" in shown

    again = [*flags, "--out", str(after), "--compare-with", str(before)]  # a file, and nothing left to play
    eval_program.main(again)
    assert "2 of 2 episodes are there already" in capsys.readouterr().out
    with pytest.raises(BadInput, match="with temperature None, this with 1"):
        eval_program.main(
            [*flags, "--out", str(tmp_path / "x.json"), "--compare-with", str(before), "--mode", "sample"]
        )
    assert not (tmp_path / "x.json").exists()


def test_a_suite_that_the_checkpoint_cannot_act_in_is_refused_before_the_first_episode(flags, tmp_path):
    out = tmp_path / "all.json"
    with pytest.raises(BadInput, match="no statistics for libero_goal"):
        eval_program.main(
            [
                *flags,
                "--checkpoint",
                TINY_CHECKPOINT,
                "--task-suite",
                "libero_spatial",
                "libero_goal",
                "--out",
                str(out),
            ]
        )
    assert not out.exists()


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
