"""`train_grpo.py` from a preset to a finished run folder, a run that begins with it, and what benchmarks make of it."""

import json
import shutil

import pytest

import eval
import train_grpo
from benchmarks import collect, compare, plot
from contracts import TimeIsUp
from envs import pool
from tests.end_to_end import reach
from tests.end_to_end.conftest import flags_into, latest_of, only_run, records_of
from vla.adapter_folder import WEIGHTS_FILE
from vla.weights import read_header


@pytest.fixture(scope="module")
def run(smoke):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "make_env", reach.make_env)
        train_grpo.main(smoke)
    return only_run(smoke)


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
    latest = latest_of(run)
    assert latest.name == "step_96"
    for name in ("proprio_projector.safetensors", "adapter_config.json", "trainer.pt"):
        assert (latest / name).stat().st_size > 0
    assert read_header(latest / WEIGHTS_FILE)[1]["looks"] == "lowpoly"
    steps = {f"step_{n}" for n in (0, 32, 64, 96)}
    assert {path.name for path in (run / "videos").iterdir()} == steps
    assert {path.stem for path in (run / "evaluations").iterdir()} == steps
    assert "Finished: 96 env steps, 3 updates" in (run / "report" / "index.html").read_text()


def test_a_run_begins_with_the_adapter_of_another_as_its_teacher_and_finds_it_again(
    smoke, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(pool, "make_env", reach.make_env)
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


def test_check_only_checks_and_leaves_no_run(smoke, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pool, "make_env", reach.make_env)
    train_grpo.main([*flags_into(smoke, tmp_path / "runs"), "--check-only"])
    assert "all checks passed" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_runs_and_results_are_collected_drawn_and_compared(run, tmp_path, capsys):
    """The run and a copy of it as another seed's, and three episodes of the run's end played by eval.py."""
    second = shutil.copytree(run, tmp_path / "second")
    description = json.loads((second / "config.json").read_text())
    description["config"]["run"]["seed"] = 2
    (second / "config.json").write_text(json.dumps(description))
    checkpoint = str(run / "checkpoints" / "latest")
    results = str(tmp_path / "results.json")
    short = ["--init-states", "both", "--first-init-state", "48", "--trials", "3", "--max-env-steps", "16"]
    short += ["--num-envs", "1", "--device", "cpu", "--assets", "lowpoly", "--task-ids", "0"]
    eval.main(["--checkpoint", checkpoint, "--mode", "greedy", "sample", *short, "--out", results])
    base, other = tmp_path / "base.json", tmp_path / "other.json"
    collect.main([str(base), str(run), str(second), "--results", results, "--note", "a trial"])
    plot.main([str(base), str(tmp_path / "base.svg")])
    assert (tmp_path / "base.svg").stat().st_size > 5_000

    stored = json.loads(base.read_text())
    assert [one["seed"] for one in stored["runs"]] == [0, 2]
    stored["results"][0]["successes"]["greedy"]["libero_spatial 0 official from 48"] = "11"
    other.write_text(json.dumps(stored))
    capsys.readouterr()
    compare.main([str(base), str(other)])
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()]
    (by_state,) = [row for row in rows if row[0] == "| greedy by state"]
    assert by_state[2:5] == ["3", "0.000", "0.667"]  # of two official states and a fresh one
