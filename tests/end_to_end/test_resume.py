"""Nothing is lost: a stopped, killed or extended run equals the run that went straight through, bit for bit.

Runs on a simulator that costs nothing; that an episode of LIBERO depends on its start alone is in test_libero.py.
"""

import signal
from pathlib import Path

import torch
from safetensors.torch import load_file

import train_grpo
from envs import pool
from tests.end_to_end import reach
from tests.end_to_end.conftest import flags_into, latest_of, only_run, records_of
from tests.end_to_end.struck import exit_code_of_struck
from tests.fakes import assert_same_bits
from tests.stored_runs import comparable_metrics


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Everything trainable in the last checkpoint."""
    folder = latest_of(run)
    adapter = load_file(folder / "adapter_model.safetensors")
    return adapter | load_file(folder / "proprio_projector.safetensors")


def trainer_of(run: Path) -> dict:
    return torch.load(latest_of(run) / "trainer.pt")


def assert_same_run(run: Path, straight: Path) -> None:
    assert comparable_metrics(run) == comparable_metrics(straight)
    assert_same_bits(weights_of(run), weights_of(straight))


# Flags of a run with everything on, whose warmup has two rollouts.
EVERYTHING = [
    "--warmup-actor", "student", "--warmup-steps", "64", "--total-steps", "128",
    "--task-ids", "0", "1", "--curriculum", "--advantage", "gae",
    "--dynamic-sampling", "--group-size", "2", "--group-success-bounds", "0", "1", "--ratio-level", "token",
    "--train-init-states", "0", "5", "--eval-interval", "1000", "--trained-blocks", "2",
]  # fmt: skip


def test_a_run_stopped_by_sigterm_and_killed_in_a_half_written_checkpoint_resumes_to_the_same_result(
    smoke, tmp_path, monkeypatch, capfd
):
    """Also with another end than it was started with."""
    monkeypatch.setattr(pool, "make_env", reach.make_env)
    everything = [*smoke, *EVERYTHING]
    flags = flags_into(everything, tmp_path / "straight")
    train_grpo.main(flags)
    straight = only_run(flags)
    assert records_of(straight)[-2]["train/optimizer_steps"] > 0  # otherwise equal weights would show nothing

    flags = flags_into([*everything, "--total-steps", "1000"], tmp_path / "stopped")
    # The steps: two of the check before the run, one of the first update, two of the second.
    capfd.readouterr()
    assert exit_code_of_struck(train_grpo.main, flags, signal.SIGTERM, "update", 5) == 130
    run = only_run(flags)
    output, errors = capfd.readouterr()
    assert errors == "train_grpo.py: interrupted\n"
    assert f"--resume {run}" in output.splitlines()[-1]
    assert latest_of(run).name == "step_32"
    resume = ["--resume", str(run), "--total-steps", "128"]
    assert exit_code_of_struck(train_grpo.main, resume, signal.SIGKILL, "checkpoint", 2) == -signal.SIGKILL
    assert latest_of(run).name == "step_32"
    assert (run / "checkpoints" / ".writing").exists()
    assert len(list((run / "checkpoints" / "lessons").iterdir())) == 2  # the second is written again

    train_grpo.main(resume)
    assert_same_run(run, straight)
    assert not (run / "checkpoints" / ".writing").exists()
    last_record = records_of(run)[-1]
    assert {"eval/greedy_success_task_0", "eval/sampled_success_task_1"} <= last_record.keys()
    trainer = trainer_of(run)
    expected = trainer_of(straight)
    for field in ("task_success", "drawn"):
        assert trainer["state"][field] == expected["state"][field]
    assert set(trainer["state"]["drawn"]) == {0, 1}
    assert any(expected["critic"]["episodes"].values())
    assert_same_bits(trainer["critic"], expected["critic"])
