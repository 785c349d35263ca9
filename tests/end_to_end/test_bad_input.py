"""What a user can get wrong ends in one line that says what to do, exit code 2, and an untouched disk."""

import sys

import pytest
from torch.nn import functional

import eval as eval_program
import train_grpo
from command_line import main_guard


@pytest.fixture
def refused(monkeypatch, capsys):
    """The one line with which a command line refuses to run."""

    def run(*argv: str, program=train_grpo) -> str:
        name = f"{program.__name__}.py"
        monkeypatch.setattr(sys, "argv", [name, *argv])
        exit_code = main_guard(name, program.main)
        errors = capsys.readouterr().err
        assert exit_code == 2, errors
        (line,) = errors.strip().splitlines()
        assert line.startswith(f"{name}: ")
        return line

    return run


def test_what_a_user_gets_wrong_is_one_line_before_there_is_a_run(refused, smoke, tmp_path):
    runs = tmp_path / "runs"
    for flags, named in (
        (["--task-id", "10"], "no task 10"),
        (["--checkpoint", str(tmp_path / "nothing")], str(tmp_path / "nothing")),
        (["--unnorm-key", "bridge_orig"], "libero_spatial_no_noops"),
        (["--train-init-states", "0", "41"], "--train-init-states"),
    ):
        assert named in refused(*smoke, "--output", str(runs), *flags)
        assert not runs.exists()


def test_evaluation_with_causal_attention_plays_no_episode(refused, monkeypatch, checkpoint, tmp_path):
    full_attention = functional.scaled_dot_product_attention

    def causal_attention(*tensors, **_):
        return full_attention(*tensors, is_causal=True)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", causal_attention)
    results = tmp_path / "results.json"
    flags = ["--checkpoint", checkpoint, "--task-ids", "0", "--trials", "1", "--out", str(results)]
    assert "attention is causal" in refused(*flags, program=eval_program)
    assert not results.exists()
