"""The run folder: complete provenance, records that survive, errors that say what to do."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.config import (
    ModelConfig,
    RunConfig,
    SimulatorConfig,
    TaskConfig,
    TrainConfig,
    changed,
    from_dict,
)
from contracts import BadInput, TimeIsUp
from envs.assets import find_pack
from experiment.run_folder import METRICS_FILE, read_metrics, reopen_run, start_run
from experiment.stopping import disk_problem, interruptible, until_the_end

ROOT = Path(__file__).parents[1]
ARGV = ["--task-id", "0", "--seed", "7"]
FIRST = {"global_step": 1, "update": 1, "rollout/success_rate": 0.5}
MAKE_ROOM = "make room, lower --keep-checkpoints, or see to permissions"


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    """A run sends the root logger to its own files; give the handlers back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers, root.level = handlers, level


def config(folder: Path, **task) -> TrainConfig:
    return TrainConfig(
        task=TaskConfig(**task),
        simulator=SimulatorConfig(assets="lowpoly"),
        model=ModelConfig(checkpoint="checkpoints/x"),
        run=RunConfig(name="trial", output=str(folder), wandb_mode="disabled", seed=7),
    )


@pytest.fixture
def run(tmp_path):
    run = start_run(config(tmp_path / "runs"), ARGV)
    yield run
    run.close()


def test_time_is_up_once_the_run_has_been_open_for_its_hours(monkeypatch, tmp_path):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limited = config(tmp_path)
    run = start_run(replace(limited, run=replace(limited.run, max_hours=2.0)), ARGV)
    now += 2 * 3600 - 1
    run.check_time()
    now += 1
    with pytest.raises(TimeIsUp, match="--max-hours 2 have passed"):
        run.check_time()
    run.close()


def test_the_folder_is_named_after_time_suite_tasks_and_name_and_never_shared(monkeypatch, tmp_path):
    monkeypatch.setattr(time, "strftime", lambda _: "20260102-030405")
    runs = [start_run(config(tmp_path, task_suite="libero_goal", task_ids=(3, 1)), ARGV) for _ in range(3)]
    name = "20260102-030405-libero_goal-3-1-trial"
    assert [run.folder.name for run in runs] == [name, f"{name}-2", f"{name}-3"]
    for run in runs:
        run.close()


def test_configuration_and_provenance_are_complete(run):
    stored = json.loads((run.folder / "config.json").read_text())
    assert from_dict(stored["config"], "config.json") == run.config
    git = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    assert stored["argv"] == ARGV
    assert stored["git"].get("commit", "") == head  # both empty outside a git checkout
    assert stored["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert {"transformers", "timm", "peft", "mujoco", "robosuite", "python"} <= set(stored["versions"])


def test_folders_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")  # refuses even root
    with pytest.raises(
        BadInput, match=r"--output .*file/x: cannot create a run folder there \((Not a dir|File ex)"
    ):
        start_run(config(tmp_path / "file" / "x"), ARGV)
    with pytest.raises(BadInput, match=r"--resume .*file: the run: cannot be written \(File exists\)"):
        reopen_run(tmp_path / "file", config(tmp_path), 0, None)


def test_reopening_drops_records_after_the_checkpoint_and_appends(run):
    run.record(1, 1, {"rollout/success_rate": 0.5, "train/nan": float("nan")})
    assert read_metrics(run.folder / METRICS_FILE) == [FIRST]  # on the disk while the run is open
    at_checkpoint = run.metrics_bytes()
    run.record(2, 2, {"will/be_played_again": 1.0})
    run.close()
    again = reopen_run(run.folder, run.config, at_checkpoint, wandb_id=None)
    assert again.metrics_bytes() == at_checkpoint
    again.record(2, 2, {})
    again.close()
    assert read_metrics(run.folder / METRICS_FILE) == [FIRST, {"global_step": 2, "update": 2}]


def test_what_a_resume_changes_stays_changed(run):
    run.close()
    reopen_run(run.folder, changed(run.config, total_steps=7), 0, None).close()
    stored = json.loads((run.folder / "config.json").read_text())
    assert (stored["config"]["phases"]["total_steps"], stored["argv"]) == (7, ARGV)


def test_the_log_goes_to_terminal_and_file_and_is_continued(run, capsys):
    logging.getLogger("train_grpo").info("step 1")
    run.close()
    again = reopen_run(run.folder, run.config, 0, None)
    logging.getLogger("train_grpo").info("step 2")
    again.close()
    assert (run.folder / "train.log").read_text() == "step 1\nstep 2\n"
    assert "step 2\n" in capsys.readouterr().out


def test_a_run_that_is_being_written_is_not_resumed(run):
    with pytest.raises(BadInput, match=f"--resume {run.folder}: the run is being written by another program"):
        reopen_run(run.folder, run.config, 0, None)
    run.close()
    reopen_run(run.folder, run.config, 0, None).close()


def test_a_run_goes_on_with_the_looks_that_it_has_seen_wherever_they_lie(run, tmp_path):
    run.close()
    copy = shutil.copytree(find_pack("lowpoly").folder, tmp_path / "copy")
    moved = replace(run.config, simulator=SimulatorConfig(assets=str(copy)))
    reopen_run(run.folder, moved, 0, None).close()
    (copy / "textures" / "smooth_light_gray_plaster.png").write_bytes(b"")
    with pytest.raises(BadInput, match=r"the run has seen assets lowpoly \(\w+\), not own"):
        reopen_run(run.folder, moved, 0, None)


def test_the_second_signal_kills():
    def twice() -> None:
        with interruptible():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGINT)

    child = os.fork()
    if child == 0:
        twice()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT


def end_with(run, reason: BaseException) -> tuple[str, str]:
    """How a run ends on an exception: what is raised for it, and its log."""
    with pytest.raises(BaseException) as caught, until_the_end(run):
        raise reason
    return f"{type(caught.value).__name__}: {caught.value}", (run.folder / "train.log").read_text()


def test_the_log_says_why_a_run_ended_and_how_to_go_on(run):
    (run.checkpoints / "latest").write_text("step_0")
    raised, logged = end_with(run, KeyboardInterrupt())
    assert raised == "KeyboardInterrupt: "
    assert logged == f"stopped; go on with: python train_grpo.py --resume {run.folder}\ninterrupted\n"


def test_a_full_gpu_is_one_line(run):
    raised, logged = end_with(run, torch.OutOfMemoryError("CUDA out of memory\nand more"))
    assert raised.startswith("BadInput: out of GPU memory (CUDA out of memory): lower --micro-batch-size")
    assert raised.endswith(logged.strip())


def test_a_run_whose_folder_was_deleted_is_told_so_and_gets_no_empty_shell(run):
    with pytest.raises(BadInput, match="is gone, moved or deleted"), until_the_end(run):
        shutil.rmtree(run.folder)
    assert not run.folder.exists()


@pytest.mark.parametrize(
    ("number", "path", "is_said"),
    [
        (errno.ENOENT, "/elsewhere/asset.xml", False),
        (errno.EACCES, "checkpoints/step_1", True),
        (errno.ENOSPC, "/tmp/frames", True),
        (errno.ECONNRESET, None, False),
        (errno.EROFS, None, True),
    ],
)
def test_disks_are_blamed_for_what_disks_do(tmp_path, number, path, is_said):
    error = OSError(number, "reason", path and str(tmp_path / path))
    found = disk_problem(error, tmp_path)
    assert found == (
        f"{error.filename or tmp_path} cannot be written (reason): {MAKE_ROOM}" if is_said else None
    )
