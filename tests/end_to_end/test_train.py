"""`train_grpo.py` from a preset to a finished run folder, and the flags that change what it does."""

import json

import pytest
from PIL import Image

import train_grpo
from tests.end_to_end.conftest import only_run, run_command


@pytest.fixture(scope="module")
def run(smoke):
    done = run_command("train_grpo.py", *smoke)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(smoke)


@pytest.fixture(scope="module")
def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_run_passes_through_all_phases(rows):
    updates = [row for row in rows if "schedule/phase" in row]
    assert [row["schedule/phase"] for row in updates] == [0, 1, 2]
    assert [row["rollout/teacher_fraction"] for row in updates][::2] == [1.0, 0.0]


def test_evaluations_come_first_at_the_interval_and_last(rows):
    assert [row["global_step"] for row in rows if "eval/teacher_success" in row] == [0, 64, 96]


def test_every_policy_gradient_update_starts_at_ratio_one(rows):
    errors = [row["train/first_ratio_error"] for row in rows if "train/first_ratio_error" in row]
    assert len(errors) == 2
    assert max(errors) < 1e-5


def test_run_folder_is_complete(run):
    stored = json.loads((run / "config.json").read_text())
    assert stored["config"]["run"]["name"] == "smoke"
    assert stored["versions"]["mujoco"] == "3.3.0"
    assert "evaluation" in (run / "train.log").read_text()
    latest = (run / "checkpoints" / "latest").resolve()
    assert latest.name == "step_96"
    assert (run / "checkpoints" / "best" / "metadata.json").is_file()
    for name in ("adapter_model.safetensors", "adapter_config.json", "proprio_projector.safetensors", "trainer.pt"):
        assert (latest / name).stat().st_size > 0
    assert Image.open(run / "report" / "curves.png").size[0] > 500
    videos = {path.name for path in (run / "videos").iterdir()}
    assert {"teacher-step_0.mp4", "student-step_96.mp4"} <= videos
    assert "Finished: 96 env steps, 3 updates" in (run / "report" / "index.html").read_text()
    assert {path.name for path in (run / "evaluations").iterdir()} == {f"step_{n}.json" for n in (0, 64, 96)}


def test_one_readable_line_per_update(run):
    lines = [line for line in (run / "train.log").read_text().splitlines() if "to go" in line]
    assert [line.split()[2] for line in lines] == ["warmup", "transition", "rl"]


@pytest.mark.parametrize(
    ("flags", "phases"),
    [
        (["--no-warmup", "--advantage", "group", "--group-size", "4", "--total-steps", "32"], [2]),
        (["--transition-steps", "0", "--importance", "behaviour", "--total-steps", "64"], [0, 2]),
    ],
)
def test_other_schedules_run(smoke, tmp_path, flags, phases):
    own = [*smoke, *flags]
    own[own.index("--output") + 1] = str(tmp_path)
    train_grpo.main(own)
    rows = [json.loads(line) for line in (only_run(own) / "metrics.jsonl").read_text().splitlines()]
    assert [row["schedule/phase"] for row in rows if "schedule/phase" in row] == phases
    if "group" in flags:
        assert next(row for row in rows if "rollout/trajectories" in row)["rollout/trajectories"] == 4


def test_a_run_can_be_watched_by_tensorboard_and_its_episodes_by_rerun(smoke, tmp_path):
    for package in ("tensorboard", "rerun"):
        pytest.importorskip(package, reason=f"the optional package {package} is not installed")
    own = [*smoke, "--warmup-only", "--eval-interval", "1000", "--tensorboard", "--rerun"]
    own[own.index("--output") + 1] = str(tmp_path)
    train_grpo.main(own)
    run = only_run(own)
    assert len(list((run / "tensorboard").iterdir())) == 1
    recordings = sorted(path.name for path in (run / "rerun").iterdir())
    assert recordings == ["student-step_0.rrd", "student-step_32.rrd", "teacher-step_0.rrd"]
    assert "could not" not in (run / "train.log").read_text()
