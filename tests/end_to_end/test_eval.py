"""`eval.py` on the real simulator, episodes of 16 env steps: what is played, by which weights, and after a kill."""

import json
import signal

import pytest
from PIL import Image

import eval as eval_program
from benchmarks import animate
from configs.cli import parse_eval
from configs.presets import TINY_CHECKPOINT
from contracts import BadInput
from envs import pool
from envs.tasks import libero_root
from tests.end_to_end import reach
from tests.end_to_end.struck import exit_code_of_struck


@pytest.fixture
def flags(checkpoint) -> list[str]:
    return [
        "--checkpoint", checkpoint, "--device", "cpu", "--max-env-steps", "16", "--trials", "2", "--num-envs", "1"
    ]  # fmt: skip


def episodes_in(path) -> list[dict]:
    """Episodes without what may differ between two evaluations of the same."""
    return [
        {name: value for name, value in episode.items() if name != "seconds"}
        for episode in json.loads(path.read_text())["episodes"]
    ]


def test_killed_evaluation_goes_on_and_equals_the_straight_one(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "make_env", reach.make_env)
    sampled = [*flags, "--task-id", "0", "--mode", "sample"]
    straight = tmp_path / "straight.json"
    killed = tmp_path / "killed.json"
    eval_program.main([*sampled, "--out", str(straight)])
    resumed = [*sampled, "--out", str(killed)]
    assert exit_code_of_struck(eval_program.main, resumed, signal.SIGKILL, "chunk", 3) == -signal.SIGKILL
    assert len(episodes_in(killed)) == 1
    eval_program.main(resumed)
    assert episodes_in(killed) == episodes_in(straight)


def test_comparison_videos_and_table(flags, checkpoint, tmp_path, capsys):
    flags = [*flags, "--task-id", "0"]
    after = tmp_path / "r.json"
    before = tmp_path / "r-before.json"
    eval_program.main([*flags, "--out", str(after), "--compare-with", checkpoint, "--video", "failures"])
    assert len(episodes_in(before)) == 2
    videos = [episode["video"] for episode in episodes_in(after)]
    assert videos == [f"libero_spatial-task_0-init_state_{i}-greedy-failure.mp4" for i in range(2)]
    assert all((tmp_path / "r-videos" / video).stat().st_size > 0 for video in videos)
    assert "0/2 = 0 % [0, 66]" in capsys.readouterr().out
    animate.main([str(after), str(after), str(tmp_path / "r.webp")])
    with Image.open(tmp_path / "r.webp") as picture:
        assert picture.size == (2 * animate.SIDE, 2 * animate.SIDE)  # two episodes, before and after
        assert picture.n_frames > 2
    eval_program.main([*flags, "--out", str(after), "--compare-with", str(before)])
    assert "+0 points" in capsys.readouterr().out


def test_a_suite_that_the_checkpoint_cannot_act_in_is_refused_before_the_first_episode(flags, tmp_path):
    out = tmp_path / "all.json"
    suites = ["--task-suite", "libero_spatial", "libero_goal", "--task-id", "0"]
    with pytest.raises(BadInput, match="libero_goal"):
        eval_program.main([*flags, "--checkpoint", TINY_CHECKPOINT, *suites, "--out", str(out)])
    assert not out.exists()


def test_all_suites_are_played_by_the_checkpoint_that_a_pointer_named_at_the_start(
    flags, checkpoint, tmp_path
):
    (tmp_path / "step_8").symlink_to(checkpoint)
    pointer = tmp_path / "best"
    pointer.write_text("step_8\n")
    config = eval_program.settle(parse_eval([*flags, "--checkpoint", str(pointer)]))
    assert config.model.checkpoint == str(tmp_path / "step_8")


def test_a_task_of_ones_own_is_evaluated_with_its_own_instruction(flags, tmp_path, capsys):
    original = (libero_root() / "bddl_files" / "libero_goal" / "turn_on_the_stove.bddl").read_text()
    renamed = original.replace("Turn on the stove", "light the stove").replace("turn on the", "light the")
    bddl_file = tmp_path / "light_it.bddl"
    bddl_file.write_text(renamed)
    out = tmp_path / "results.json"
    eval_program.main([*flags, "--bddl-file", str(bddl_file), "--trials", "1", "--out", str(out)])
    assert "light the stove" in capsys.readouterr().out
    assert json.loads(out.read_text())["settings"]["bddl_sha256"]
