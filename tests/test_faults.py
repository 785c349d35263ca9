"""Whatever stops a run at whatever moment: one line, its checkpoint whole, and --resume gets to the same result.

The moments are those of docs/FAULTS.md; the program runs from its command line, on fakes (tests/whole_program.py).
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator

import pytest
import torch

import rl.checkpoints
import rl.evaluation
import rl.run
from tests.whole_program import (
    LOADING,
    MOMENTS,
    RUNNING,
    at,
    command_line,
    flags_into,
    in_a_process_of_its_own,
    killed,
    one_line,
    only_run,
    raising,
    results,
    resume,
    stopped_at,
    straight,
    use_fakes,
)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the suite runs in the background
    straight()  # once, before anything is patched
    use_fakes(monkeypatch)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def signalled(*_, **__) -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("moment", LOADING)
def test_a_signal_before_the_run_folder_leaves_nothing(capfd, tmp_path, moment):
    assert stopped_at(moment, signalled, tmp_path) == 130
    assert one_line(capfd.readouterr().err) == "train_grpo.py: interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", RUNNING)
def test_a_signal_at_any_moment_is_one_line_and_the_run_goes_on_to_the_same_result(
    monkeypatch, capsys, tmp_path, moment
):
    number = signal.SIGINT if len(moment) % 2 else signal.SIGTERM  # both take the same path
    at(monkeypatch, moment, lambda *_: signal.raise_signal(number))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 130
    said, run = capsys.readouterr(), only_run(tmp_path)
    assert one_line(said.err) == "train_grpo.py: interrupted"
    assert said.out.splitlines()[-1] == f"stopped; go on with: python train_grpo.py --resume {run}"
    assert (run / "train.log").read_text().splitlines()[-1] == "interrupted"
    assert not list((run / "checkpoints").glob(".writing-*"))
    assert resume(run) == 0
    assert results(run) == straight()


def test_a_second_signal_kills(tmp_path):
    def interrupted_twice(patch) -> int:
        patch.setattr(rl.run.Run, "close", signalled)  # the first one's KeyboardInterrupt closes the run
        at(patch, "rollout", signalled)
        return command_line(patch, *flags_into(tmp_path))

    assert in_a_process_of_its_own(interrupted_twice) == -signal.SIGTERM
    assert resume(only_run(tmp_path)) == 0


@pytest.mark.parametrize("moment", RUNNING)
def test_kill_9_at_any_moment_loses_the_rollout_under_way_at_most(tmp_path, moment):
    assert stopped_at(moment, killed, tmp_path) == -signal.SIGKILL
    run = only_run(tmp_path)
    saved = torch.load(rl.checkpoints.latest_checkpoint(run) / "trainer.pt")["state"]["update"]
    finished = sum("rollout/trajectories" in line for line in (run / "metrics.jsonl").read_text().splitlines())
    assert saved >= finished - 1  # a record comes before its checkpoint
    assert resume(run) == 0
    assert results(run) == straight()
    assert list((run / "checkpoints").glob(".*")) == []


@pytest.mark.parametrize("count", [2, 3])
def test_kill_9_between_a_checkpoint_and_its_pointers_leaves_best_as_it_would_be(monkeypatch, tmp_path, count):
    """By returns: the first update is the best (all are equal). Its pointers are the second and the third to be set."""
    monkeypatch.setitem(MOMENTS, "pointer", (rl.checkpoints, "point", count))
    assert stopped_at("pointer", killed, tmp_path, "--best-by", "return") == -signal.SIGKILL
    run = only_run(tmp_path)
    assert resume(run) == 0
    assert (run / "checkpoints" / "best").read_text().strip() == "step_24"


def test_kill_9_within_a_metrics_line_leaves_no_trace_of_it(tmp_path):
    half = lambda descriptor, data: (os.write(descriptor, data[:40]), killed())  # noqa: E731
    assert stopped_at("metrics line", half, tmp_path) == -signal.SIGKILL
    run = only_run(tmp_path)
    assert not (run / "metrics.jsonl").read_text().endswith("\n")
    assert resume(run) == 0
    assert results(run) == straight()


def test_a_run_folder_that_was_copied_with_its_links_followed_goes_on(tmp_path):
    assert stopped_at("update", killed, tmp_path / "runs") == -signal.SIGKILL
    copy = shutil.copytree(only_run(tmp_path / "runs"), tmp_path / "copy", symlinks=False)
    shutil.copytree(copy / "checkpoints" / "step_0", copy / "checkpoints" / "step_0-copy")
    assert resume(copy) == 0
    assert results(copy) == straight()
    assert (copy / "checkpoints" / "step_0-copy").is_dir()  # not ours


def test_an_error_of_the_program_keeps_its_traceback_and_is_in_the_log(monkeypatch, tmp_path):
    at(monkeypatch, "update", raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        command_line(monkeypatch, *flags_into(tmp_path))
    logged = (only_run(tmp_path) / "train.log").read_text()
    assert "Traceback" in logged
    assert logged.endswith("ZeroDivisionError: a bug\n")


def test_a_run_that_is_being_written_is_not_resumed(monkeypatch, capfd, tmp_path):
    refused = []

    def second_program(*_):
        code = in_a_process_of_its_own(lambda _: resume(only_run(tmp_path)))
        refused.append((code, capfd.readouterr().err))

    at(monkeypatch, "rollout", second_program)
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 0
    ((code, said),) = refused
    assert code == 2
    assert "is being written by" in one_line(said)


def test_a_reader_that_has_gone_is_no_fault(monkeypatch, tmp_path):
    """As with `| tee log` after Ctrl-C, which ends tee, too."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        assert command_line(monkeypatch, *flags_into(tmp_path)) == 0
    assert results(only_run(tmp_path)) == straight()


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


def test_a_metrics_line_on_a_full_disk_is_one_line(monkeypatch, capsys, tmp_path):
    """/dev/full refuses as a full disk does."""
    at(monkeypatch, "metrics line", lambda descriptor, _: os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    assert "(No space left on device; " in one_line(capsys.readouterr().err)
    run = only_run(tmp_path)
    assert rl.checkpoints.latest_checkpoint(run).name == "step_24"
    assert resume(run) == 0
    assert results(run) == straight()


def test_a_picture_that_does_not_fit_costs_the_picture(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(rl.evaluation, "write_video", raising(OSError(errno.ENOSPC, "No space left on device")))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 0
    shown = capsys.readouterr()
    assert "could not be written ([Errno 28] No space left on device)" in shown.out
    assert shown.err == ""
    assert results(only_run(tmp_path)) == straight()


@pytest.mark.parametrize("moment", ["rollout", "checkpoint", "final evaluation"])
def test_a_run_whose_folder_was_deleted_stops_and_does_not_bring_back_an_empty_shell(
    monkeypatch, capsys, tmp_path, moment
):
    at(monkeypatch, moment, lambda *_: shutil.rmtree(only_run(tmp_path)))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    assert "is gone: it was moved or deleted" in one_line(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
