"""Nothing is lost: a stopped, killed or extended run equals the run that went straight through, bit for bit."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
from contracts import TimeIsUp
from tests.end_to_end.conftest import ROOT, flags_into, latest_of, only_run, records_of, run_command

# What may differ between two runs of the same computation: how long it took, how much memory.
TIMES = ("time/", "rollout/time_s", "rollout/env_steps_per_s", "train/time_s", "system/")


def metrics_of(run):
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in records_of(run)]


def weights_of(run):
    folder = latest_of(run)
    return load_file(folder / "adapter_model.safetensors") | load_file(folder / "proprio_projector.safetensors")


def assert_same_run(run, straight):
    assert metrics_of(run) == metrics_of(straight)
    weights, expected = weights_of(run), weights_of(straight)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def killed(where: str, count: int, *argv: str) -> None:
    done = run_command("-m", "tests.end_to_end.killed", where, str(count), "train_grpo", *argv)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


@pytest.fixture(scope="module")
def straight(smoke):
    train_grpo.main(smoke)
    run = only_run(smoke)
    assert records_of(run)[-2]["train/optimizer_steps"] > 0  # or equal weights would show nothing
    return run


def test_a_run_whose_time_is_up_and_that_is_extended_equals_the_straight_one(smoke, straight, tmp_path):
    flags = flags_into(smoke, tmp_path)
    with pytest.raises(TimeIsUp):
        train_grpo.main([*flags, "--total-steps", "64", "--max-hours", "1e-9"])
    run = only_run(flags)
    assert latest_of(run).name == "step_32"
    train_grpo.main(["--resume", str(run), "--max-hours", "100"])
    assert latest_of(run).name == "step_64"
    train_grpo.main(["--resume", str(run), "--max-hours", "100", "--total-steps", "96"])
    assert_same_run(run, straight)


def test_a_run_killed_in_a_rollout_and_in_a_half_written_checkpoint_resumes_to_the_same_result(
    smoke, straight, tmp_path
):
    flags = flags_into(smoke, tmp_path)
    killed("chunk", 12, *flags)
    run = only_run(flags)
    saved = latest_of(run)
    killed("checkpoint", 1, "--resume", str(run))
    assert list((run / "checkpoints").glob(".writing-*"))
    assert latest_of(run) == saved
    train_grpo.main(["--resume", str(run)])
    assert_same_run(run, straight)
    assert not list((run / "checkpoints").glob(".writing-*"))


def test_killed_run_with_everything_on_resumes_to_the_same_result(smoke, tmp_path):
    everything = [
        *smoke, "--task-ids", "0", "1", "--curriculum", "--advantage", "gae", "--value-warmup-steps", "16",
        "--dynamic-sampling", "--group-size", "2", "--group-success-bounds", "0", "1", "--ratio-level", "token",
        "--warmup-steps", "0", "--total-steps", "64", "--eval-interval", "1000", "--train-init-states", "0", "5",
    ]  # fmt: skip
    straight, cut = flags_into(everything, tmp_path / "straight"), flags_into(everything, tmp_path / "killed")
    train_grpo.main(straight)
    killed("update", 3, *cut)
    train_grpo.main(["--resume", str(only_run(cut))])
    assert_same_run(only_run(cut), only_run(straight))
    evaluated = metrics_of(only_run(straight))[-1]
    assert {"eval/student_success_task_0", "eval/student_sampled_success_task_1"} <= evaluated.keys()
    states = [torch.load(latest_of(only_run(f)) / "trainer.pt") for f in (straight, cut)]
    assert all(states[0]["state"][cursor] == states[1]["state"][cursor] for cursor in ("task_success", "drawn"))
    assert set(states[0]["state"]["drawn"]) == {0, 1}
    assert all(torch.equal(states[0]["critic"][name], states[1]["critic"][name]) for name in states[0]["critic"])


def test_sigterm_leaves_the_newest_checkpoint_and_exit_code_130(smoke, tmp_path):
    flags = [*flags_into(smoke, tmp_path), "--warmup-steps", "100000", "--total-steps", "100000"]
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
    run = only_run(flags)
    assert rest.splitlines()[-1] == f"stopped; go on with: python train_grpo.py --resume {run}"
    steps = [row["global_step"] for row in records_of(run) if "rollout/trajectories" in row]
    assert latest_of(run).name == f"step_{steps[-1]}"
