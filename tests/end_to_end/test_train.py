"""`train_grpo.py` from a preset to a finished run folder, and the flags that change what it does."""

import json

import pytest

import train_grpo
from configs.cli import parse_train
from contracts import TimeIsUp
from tests.end_to_end.conftest import flags_into, latest_of, only_run, records_of
from vla.adapter_folder import WEIGHTS_FILE
from vla.weights import read_header


@pytest.fixture(scope="module")
def run(smoke):
    folder = train_grpo.run_training(parse_train(smoke).config)
    assert folder == only_run(smoke)
    return folder


def test_run_passes_through_all_phases_and_evaluates_at_both_ends_after_the_warmup_and_at_the_interval(run):
    rows = records_of(run)
    updates = [row for row in rows if "schedule/phase" in row]
    assert [row["schedule/phase"] for row in updates] == [0, 1, 2]
    assert [row["rollout/teacher_fraction"] for row in updates][::2] == [1.0, 0.0]
    assert [row["global_step"] for row in rows if "eval/teacher_success" in row] == [0, 32, 64, 96]


def test_every_policy_gradient_update_starts_at_ratio_one(run):
    errors = [row["train/first_ratio_error"] for row in records_of(run) if "train/first_ratio_error" in row]
    assert len(errors) == 2
    assert max(errors) < 1e-5


def test_run_folder_is_complete(run):
    description = json.loads((run / "config.json").read_text())
    assert description["config"]["run"]["name"] == "smoke"
    assert description["argv"] == ["--config", "RUN"]  # it was started from Python
    assert description["versions"]["mujoco"] == "3.3.0"
    latest = latest_of(run)
    assert latest.name == "step_96"
    weights = ["adapter_model.safetensors", "proprio_projector.safetensors"]
    for name in (*weights, "adapter_config.json", "trainer.pt"):
        assert (latest / name).stat().st_size > 0
    assert read_header(latest / WEIGHTS_FILE)[1]["looks"] == "lowpoly"
    assert {path.name for path in (run / "videos").iterdir()} == {f"step_{n}" for n in (0, 32, 64, 96)}
    assert "Finished: 96 env steps, 3 updates" in (run / "report" / "index.html").read_text()
    assert {path.name for path in (run / "evaluations").iterdir()} == {
        f"step_{n}.json" for n in (0, 32, 64, 96)
    }


def test_a_run_begins_with_the_adapter_of_another_as_its_teacher_and_finds_it_again(smoke, run, tmp_path):
    adapter = run / "checkpoints" / "latest"
    flags = [*flags_into(smoke, tmp_path), "--checkpoint", str(adapter), "--warmup-actor", "student"]
    flags += ["--total-steps", "64", "--eval-interval", "1000"]
    with pytest.raises(TimeIsUp):
        train_grpo.main([*flags, "--max-hours", "1e-9"])
    student = only_run(flags)
    settings = json.loads((student / "config.json").read_text())["config"]
    assert settings["model"]["checkpoint"] == str(latest_of(run))
    train_grpo.main(["--resume", str(student), "--max-hours", "100"])
    updates = [row for row in records_of(student) if "schedule/phase" in row]
    assert [row["schedule/phase"] for row in updates] == [0, 1]
    assert updates[0]["rollout/teacher_fraction"] == 0.0
    assert "distill/accuracy" in updates[0]
