"""A disk that is full, read-only or gone: one line, the last checkpoint stays, and pictures never stop a run.

The program runs from its command line, on fakes (tests/whole_program.py).
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest

import eval as eval_program
import preflight
import rl.evaluation_files
import rl.report
import rl.run
import train_grpo
from configs.config import EvalConfig
from errors import BadInput
from rl.disk import disk_problem
from rl.eval_plan import Key, Task, make_plan
from rl.results import Results, Settings, save_results
from rl.trajectory import Episode, Trajectory
from tests.fakes import FakePolicy
from tests.whole_program import (
    START,
    at,
    command_line,
    flags_into,
    one_line,
    only_run,
    raising,
    results,
    resume,
    straight,
    use_fakes,
)

SETTINGS = Settings("x", "abc", "greedy", None, 0, "low-poly", None, "cpu", "float32")


@pytest.fixture(autouse=True)
def _fakes(monkeypatch) -> None:
    straight()  # once, before anything is patched
    use_fakes(monkeypatch)


# full


def test_a_checkpoint_that_no_longer_fits_is_one_line_and_the_last_one_stays(monkeypatch, capsys, tmp_path):
    """The kernel refuses the file's growth half-way (RLIMIT_FSIZE: it needs no root and no disk of one's own)."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    at(monkeypatch, "checkpoint", lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard)))
    try:
        assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    line, run = one_line(capsys.readouterr().err), only_run(tmp_path)
    assert "no room for" in line
    assert "--resume" in line
    assert line.endswith((run / "train.log").read_text().splitlines()[-1])  # the log says why the run ended
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best", "latest", "step_0", "step_24"]
    assert resume(run) == 0
    assert results(run) == straight()


def test_a_checkpoint_that_will_not_fit_is_not_begun(monkeypatch, capsys, tmp_path):
    def full(*_):
        disk = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=1000))
        monkeypatch.setattr(FakePolicy, "save_adapter", raising(AssertionError("nothing may be written")))

    at(monkeypatch, "update", full)
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    line = one_line(capsys.readouterr().err)
    assert "(a checkpoint needs 0.01 GiB; 0.00 GiB are free): make room" in line


def test_a_metrics_line_on_a_full_disk_is_one_line(monkeypatch, capsys, tmp_path):
    """/dev/full refuses as a full disk does."""

    def full(descriptor, _):
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)

    at(monkeypatch, "metrics line", full)
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    assert "(No space left on device; " in one_line(capsys.readouterr().err)
    run = only_run(tmp_path)
    assert (run / "checkpoints" / "latest").resolve().name == "step_24"
    assert resume(run) == 0
    assert results(run) == straight()


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (rl.evaluation_files, "write_video", "student-step_48.mp4 could not be written"),
        (rl.evaluation_files, "write_json", "the evaluation's episodes could not be written"),
        (rl.report, "write_report", "no report could be written"),
        (preflight.imageio, "imwrite", "first_frame.png could not be written"),
    ],
)
def test_a_picture_that_does_not_fit_costs_the_picture(monkeypatch, capsys, tmp_path, owner, name, said):
    monkeypatch.setattr(owner, name, raising(OSError(errno.ENOSPC, "No space left on device")))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 0
    shown = capsys.readouterr()
    assert f"{said} ([Errno 28] No space left on device)" in shown.out
    assert shown.err == ""
    assert results(only_run(tmp_path)) == straight()


def test_a_log_file_that_does_not_fit_is_said_once(monkeypatch, capsys, tmp_path):
    def full(*_):
        (handler,) = [h for h in train_grpo.log.parent.handlers if isinstance(h, rl.run.LogFile)]
        os.dup2(os.open("/dev/full", os.O_WRONLY), handler.stream.fileno())

    at(monkeypatch, "baseline evaluation", full)
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 0
    shown = capsys.readouterr()
    assert (shown.err, shown.out.count("train.log cannot be written")) == ("", 1)
    assert results(only_run(tmp_path)) == straight()


@pytest.mark.parametrize("moment", ["teacher probe", "first checkpoint", "metrics line", "checkpoint", "pointer"])
def test_a_folder_that_has_become_read_only_is_one_line(monkeypatch, capsys, tmp_path, moment):
    at(monkeypatch, moment, raising(OSError(errno.EROFS, "Read-only file system", "runs/R/file")))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    line = one_line(capsys.readouterr().err)
    assert "runs/R/file cannot be written (Read-only file system): see to its disk and permissions; " in line
    assert line.endswith("nothing was saved yet" if moment in START else "--resume goes on from it")


@pytest.mark.parametrize("moment", ["rollout", "update", "checkpoint", "evaluation", "final evaluation", "report"])
def test_a_run_whose_folder_was_deleted_stops_and_does_not_bring_back_an_empty_shell(
    monkeypatch, capsys, tmp_path, moment
):
    at(monkeypatch, moment, lambda *_: shutil.rmtree(only_run(tmp_path)))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    assert "is gone: it was moved or deleted" in one_line(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_folder_was_moved_stops_and_goes_on_in_its_new_place(
    monkeypatch, capsys, tmp_path, tmp_path_factory
):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run"
    at(monkeypatch, "rollout", lambda *_: only_run(tmp_path).rename(elsewhere))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    assert "is gone" in one_line(capsys.readouterr().err)
    assert resume(elsewhere) == 0
    assert results(elsewhere) == straight()


@pytest.mark.parametrize(
    ("error", "is_said"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/elsewhere/asset.xml"), False),
        (PermissionError(errno.EACCES, "Permission denied", "/elsewhere/cache"), False),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/frames"), True),
        (OSError(errno.EIO, "Input/output error"), True),
    ],
)
def test_only_disks_are_blamed_and_elsewhere_only_for_what_disks_do(tmp_path, error, is_said):
    assert (disk_problem(error, tmp_path) is not None) == is_said
    inside = OSError(error.errno, error.strerror, str(tmp_path / "checkpoints"))
    assert (disk_problem(inside, tmp_path) is not None) == (error.errno != errno.ECONNRESET)


# eval.py


def test_a_results_file_that_does_not_fit_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "write_text", raising(OSError(errno.ENOSPC, "No space left on device")))
    plan = make_plan([Task("libero_goal", 0, "task", "do it", 300, 50)], 1, 0, {})
    with pytest.raises(BadInput, match=r"--out .*r\.json: cannot be written \(No space left on device\)"):
        save_results(Results(tmp_path / "r.json", SETTINGS), plan)
    assert list(tmp_path.iterdir()) == []


def test_a_video_of_an_evaluation_that_does_not_fit_costs_the_video(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(eval_program, "write_video", raising(OSError(errno.ENOSPC, "No space left on device")))
    config = EvalConfig(checkpoint="x", video="all")
    played = Trajectory(Episode(0, 0, 0, 0), success=True)
    key = Key("libero_goal", 0, 0, 0)
    record = eval_program.played_episode(config, Results(tmp_path / "r.json", SETTINGS), key, played)
    assert (record.success, record.video) == (True, None)
    assert "success.mp4 could not be written" in caplog.text
