"""What a user can get wrong ends in one line that says what to do, exit code 2, and an untouched disk."""

import os
import shutil
import sys

import pytest
from torch.nn import functional

import eval as eval_program
import train_grpo
from command_line import main_guard
from tests.end_to_end.conftest import latest_of


@pytest.fixture
def refused(monkeypatch, capsys):
    """The one line with which a command line refuses to run."""

    def run(*argv: str, program=train_grpo) -> str:
        name = f"{program.__name__}.py"
        monkeypatch.setattr(sys, "argv", [name, *argv])
        code, errors = main_guard(name, program.main), capsys.readouterr().err
        assert code == 2, errors
        (line,) = errors.strip().splitlines()
        assert line.startswith(f"{name}: ")
        return line

    return run


def test_what_a_user_gets_wrong_is_one_line_before_there_is_a_run(refused, smoke, checkpoint, tmp_path):
    runs, cut = tmp_path / "runs", shutil.copytree(checkpoint, tmp_path / "cut")
    os.truncate(cut / "model.safetensors", (cut / "model.safetensors").stat().st_size // 2)
    for flags, said in (
        (["--task-id", "10"], "0..9"),
        (["--checkpoint", str(tmp_path / "nothing")], str(tmp_path / "nothing")),
        (["--checkpoint", str(cut)], "model.safetensors"),
        (["--unnorm-key", "bridge_orig"], "libero_spatial_no_noops"),
        (["--no-allow-zero-baseline"], "% of the token head's probability lies on action tokens"),
    ):
        assert said in refused(*smoke, "--output", str(runs), *flags)
        assert not runs.exists()
    (tmp_path / "file").write_text("")
    assert "cannot create a run folder" in refused(*smoke, "--output", str(tmp_path / "file" / "runs"))


def test_damaged_training_state_is_named_and_left_alone(refused, smoke, tmp_path):
    flags = [*smoke, "--output", str(tmp_path), "--total-steps", "0"]
    train_grpo.main(flags)
    (run,) = tmp_path.iterdir()
    state = latest_of(run) / "trainer.pt"
    state.write_bytes(state.read_bytes()[:1000])
    before = (run / "metrics.jsonl").read_bytes()
    assert "trainer.pt" in refused("--resume", str(run))
    assert (run / "metrics.jsonl").read_bytes() == before


def test_evaluation_with_causal_attention_plays_no_episode(refused, monkeypatch, checkpoint, tmp_path):
    full = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *args, **_: full(*args, is_causal=True)
    )
    flags = [
        "--checkpoint",
        checkpoint,
        "--task-ids",
        "0",
        "--trials",
        "1",
        "--out",
        str(tmp_path / "results.json"),
    ]
    assert "attention is causal" in refused(*flags, program=eval_program)
    assert not (tmp_path / "results.json").exists()
