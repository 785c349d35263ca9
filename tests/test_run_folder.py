"""The run folder: complete provenance, records that survive, one writer, errors that say what to do."""

import json
import logging
import shutil
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from configs.config import TrainConfig, changed, config_from_json
from contracts import BadInput, TimeIsUp
from envs.assets import find_pack
from experiment.resume import reopen_run
from experiment.run_folder import Run, start_run
from experiment.stored_run import METRICS_FILE, read_description, read_metrics
from experiment.terminal import log_to_terminal
from preflight import check_resumed_folder

ROOT = Path(__file__).parents[1]
ARGV = ["--task-id", "0", "--seed", "7"]
RESUME = ["--resume", "runs/trial"]


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    """A run sends the root logger to its own files; give the handlers back."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers = handlers
    root.level = level


def config(output: Path, **settings) -> TrainConfig:
    default = {"name": "trial", "output": str(output), "wandb_mode": "disabled", "assets": "lowpoly"}
    return changed(TrainConfig(), **default | settings)


@pytest.fixture
def run(tmp_path):
    run = start_run(config(tmp_path / "runs"), ARGV, hub_commit="a" * 40)
    yield run
    run.close()


# a new run


def test_two_runs_that_start_in_the_same_second_have_folders_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(time, "strftime", lambda _: "20260102-030405")
    runs = [start_run(config(tmp_path), ARGV) for _ in range(2)]
    assert runs[0].folder != runs[1].folder
    for run in runs:
        run.close()


def test_configuration_and_provenance_are_complete(run):
    stored = read_description(run.folder)
    assert config_from_json(stored["config"]) == run.config
    assert stored["argv"] == ARGV
    assert stored["hub_commit"] == "a" * 40
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    assert stored["git"].get("commit", "") == commit  # both are empty outside a git checkout
    assert {"torch", "transformers", "timm", "peft", "mujoco", "robosuite", "python"} <= set(
        stored["versions"]
    )


def test_the_log_goes_to_terminal_and_file_from_its_first_line_on_and_is_continued(tmp_path, capsys):
    log = logging.getLogger("train_grpo")
    log_to_terminal()
    log.info("step 0")
    run = start_run(config(tmp_path), ARGV)
    log.info("step 1")
    run.close()
    log_to_terminal()
    resumed = reopen_run(run.folder, run.config, RESUME, 0, None)
    log.info("step 2")
    resumed.close()
    lines = (run.folder / "train.log").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["step 0", "step 1", "step 2"]
    assert capsys.readouterr().out.splitlines() == ["step 0", "step 1", "step 2"]


# records


def test_a_record_is_on_the_disk_at_once_and_holds_valid_json(run):
    run.log_metrics(1, 3, {"rollout/success_rate": 0.5, "train/nan": float("nan")})
    (line,) = (run.folder / METRICS_FILE).read_text().splitlines()
    assert json.loads(line)["train/nan"] is None  # JSON has no NaN
    # The reader leaves out what was not finite, and half a line.
    with (run.folder / METRICS_FILE).open("a") as file:
        file.write('{"global_step": 2')
    assert read_metrics(run.folder / METRICS_FILE) == [
        {"global_step": 1, "update": 3, "rollout/success_rate": 0.5}
    ]


# a resumed run


def test_what_a_resume_changes_stays_changed(run):
    run.close()
    for total_steps in (7, 9):
        reopen_run(run.folder, changed(run.config, total_steps=total_steps), RESUME, 0, None).close()
    stored = read_description(run.folder)
    assert (stored["config"]["phases"]["total_steps"], stored["argv"]) == (9, ARGV)
    assert stored["resume_argv"] == [RESUME, RESUME]


def test_a_run_that_is_being_written_is_not_resumed(run):
    with pytest.raises(BadInput, match="being written"):
        reopen_run(run.folder, run.config, RESUME, 0, None)
    with pytest.raises(BadInput, match="being written"):
        check_resumed_folder(run.folder)  # before anything takes memory


def test_a_run_goes_on_with_the_looks_that_it_has_seen_wherever_they_lie(tmp_path):
    first, second = (shutil.copytree(find_pack("lowpoly").folder, tmp_path / name) for name in ("1", "2"))
    run = start_run(changed(config(tmp_path), assets=str(first)), ARGV)
    run.close()
    moved = changed(run.config, assets=str(second))
    reopen_run(run.folder, moved, RESUME, 0, None).close()
    (second / "textures" / "smooth_light_gray_plaster.png").write_bytes(b"")
    with pytest.raises(BadInput, match="--assets"):
        reopen_run(run.folder, moved, RESUME, 0, None)


def test_a_run_does_not_go_on_in_another_simulator(run, monkeypatch):
    run.close()
    monkeypatch.setattr("experiment.resume.simulator_packages", lambda: "mujoco 3.3.2")
    with pytest.raises(BadInput, match="now: mujoco"):
        reopen_run(run.folder, run.config, RESUME, 0, None)


# the end of its time


@pytest.mark.parametrize("is_over", [False, True])
def test_time_is_up_for_all_ranks_when_it_is_for_rank_0(tmp_path, is_over):
    """Another rank with a clock of its own would wait for ranks that have stopped."""
    hours_of_rank_0 = 2.01 if is_over else 1.99
    second_rank = Mock(is_main=False, from_main=lambda own_seconds: 3600 * hours_of_rank_0)
    run = Run(tmp_path, config(tmp_path, max_hours=2.0), second_rank)
    with pytest.raises(TimeIsUp) if is_over else nullcontext():
        run.stop_when_time_is_up()
