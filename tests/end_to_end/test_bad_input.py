"""What a user can get wrong ends in one line that says what to do, exit code 2, and an untouched disk."""

import shutil
import sys

import pytest
import torch
from torch.nn import functional

import eval as eval_program
import train_grpo
from configs.cli import main_guard
from tests.end_to_end.conftest import latest_of


def one_line(program: str, code: int, errors: str) -> str:
    assert code == 2, errors
    lines = errors.strip().splitlines()
    assert len(lines) == 1, errors
    assert lines[0].startswith(f"{program}: ")
    return lines[0]


@pytest.fixture
def refused(monkeypatch, capsys):
    """The one line with which a command line refuses to run."""

    def run(*argv: str, program=train_grpo) -> str:
        name = f"{program.__name__}.py"
        monkeypatch.setattr(sys, "argv", [name, *argv])
        return one_line(name, main_guard(name, program.main), capsys.readouterr().err)

    return run


def test_7b_preset_without_a_gpu_names_the_command_that_works_here(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refused("--task-id", "0")
    assert "needs a CUDA GPU" in line
    assert "make demo" in line


def test_unknown_task_id_lists_what_exists(refused, smoke, tmp_path):
    line = refused(*smoke, "--output", str(tmp_path), "--task-id", "10")
    assert "0..9" in line or "0-9" in line
    assert not list(tmp_path.iterdir())


def test_missing_checkpoint(refused, smoke, tmp_path):
    line = refused(*smoke, "--output", str(tmp_path / "runs"), "--checkpoint", str(tmp_path / "nothing"))
    assert str(tmp_path / "nothing") in line
    assert not (tmp_path / "runs").exists()


def test_half_written_checkpoint_names_the_file(refused, smoke, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "cut")
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    assert "model.safetensors" in refused(*smoke, "--checkpoint", str(folder))


def test_wrong_statistics_key_lists_the_keys(refused, smoke):
    line = refused(*smoke, "--unnorm-key", "bridge_orig")
    assert "bridge_orig" in line
    assert "libero_spatial_no_noops" in line


def test_unwritable_output_folder(refused, smoke, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot create a run folder" in refused(*smoke, "--output", str(tmp_path / "file" / "runs"))


def test_token_head_that_was_never_trained_is_found_before_the_run_starts(refused, smoke, tmp_path):
    line = refused(*smoke, "--output", str(tmp_path), "--no-allow-zero-baseline")
    assert "% of the token head's probability lies on action tokens" in line
    assert "--allow-zero-baseline" in line
    assert not list(tmp_path.iterdir())


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
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *args, **_: full(*args, is_causal=True))
    flags = ["--checkpoint", checkpoint, "--task-ids", "0", "--trials", "1", "--out", str(tmp_path / "results.json")]
    assert "attention is causal" in refused(*flags, program=eval_program)
    assert not (tmp_path / "results.json").exists()


def test_check_only_shows_every_finding_and_fails_in_one_line(monkeypatch, capsys, checkpoint, tmp_path):
    flags = ["--preset", "tiny", "--checkpoint", checkpoint, "--output", str(tmp_path / "runs"), "--check-only"]
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *flags])
    code = main_guard("train_grpo.py", train_grpo.main)
    printed = capsys.readouterr()
    line = one_line("train_grpo.py", code, printed.err)
    assert "checks FAILED; token head: " in line
    assert "--allow-zero-baseline" in line
    *findings, total = printed.out.splitlines()
    outcomes = [finding.split()[0] for finding in findings]
    assert outcomes.count("FAILED") == 1, printed.out
    assert outcomes.count("ok") >= 15, printed.out
    assert total.endswith("1 warning, 1 FAILED")  # and random weights have never seen our pictures
    assert not (tmp_path / "runs").exists()
