"""Nothing is lost: a stopped, killed or extended run equals the run that went straight through, bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
from tests.end_to_end.conftest import ROOT, flags_into, latest_of, only_run, records_of, run_command

# What may differ between two runs of the same computation: how long it took, how much memory.
TIMES = ("time/", "rollout/time_s", "rollout/env_steps_per_s", "train/time_s", "system/")


def metrics_of(run):
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMES)} for row in records_of(run)
    ]


def weights_of(run):
    folder = latest_of(run)
    return load_file(folder / "adapter_model.safetensors") | load_file(
        folder / "proprio_projector.safetensors"
    )


def assert_same_run(run, straight):
    assert metrics_of(run) == metrics_of(straight)
    weights, expected = weights_of(run), weights_of(straight)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture
def everything(smoke) -> list[str]:
    """Flags of a run with everything on."""
    return [
        *smoke, "--task-ids", "0", "1", "--curriculum", "--advantage", "gae",
        "--dynamic-sampling", "--group-size", "2", "--group-success-bounds", "0", "1", "--ratio-level", "token",
        "--train-init-states", "0", "5", "--eval-interval", "1000",
    ]  # fmt: skip


def stopped_by_sigterm(flags: list[str]) -> Path:
    """The folder of a run that SIGTERM has stopped after its first update."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "train_grpo.py", *flags], cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        for line in process.stdout:
            if "to go" in line:  # the first update is done
                process.terminate()
                break
        rest, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "train_grpo.py: interrupted"
    assert "Traceback" not in errors
    assert rest.splitlines()[-1] == f"stopped; go on with: python train_grpo.py --resume {only_run(flags)}"
    return only_run(flags)


def test_a_run_stopped_by_sigterm_and_killed_in_a_half_written_checkpoint_resumes_to_the_same_result(
    everything, tmp_path
):
    """With another end, too."""
    flags = flags_into(everything, tmp_path / "straight")
    train_grpo.main(flags)
    straight = only_run(flags)
    assert records_of(straight)[-2]["train/optimizer_steps"] > 0  # or equal weights would show nothing

    run = stopped_by_sigterm(flags_into([*everything, "--total-steps", "1000"], tmp_path / "stopped"))
    assert latest_of(run).name == "step_32"
    again = ["--resume", str(run), "--total-steps", "96"]
    killed = run_command("-m", "tests.end_to_end.killed", "checkpoint", "2", "train_grpo", *again)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    assert latest_of(run).name == "step_64"
    assert list((run / "checkpoints").glob(".writing-*"))
    train_grpo.main(again)
    assert_same_run(run, straight)
    assert not list((run / "checkpoints").glob(".writing-*"))
    assert {"eval/student_success_task_0", "eval/student_sampled_success_task_1"} <= metrics_of(run)[
        -1
    ].keys()
    states = [torch.load(latest_of(folder) / "trainer.pt") for folder in (straight, run)]
    assert all(
        states[0]["state"][cursor] == states[1]["state"][cursor] for cursor in ("task_success", "drawn")
    )
    assert set(states[0]["state"]["drawn"]) == {0, 1}
    remembered = [
        [episode for of_task in state["critic"].values() for episode in of_task] for state in states
    ]
    assert len(remembered[0]) == len(remembered[1]) > 0
    assert all(torch.equal(a, b) and x == y for (a, x), (b, y) in zip(*remembered, strict=True))
