"""Whatever stops a run at whatever moment: one line, its checkpoint whole, and --resume gets to the same result.

The moments are those of docs/FAULTS.md; the program runs from its command line, on fakes (tests/whole_program.py).
"""

from __future__ import annotations

import ast
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eval as eval_program
import preflight
import rl.checkpoints
import rl.evaluation_files
import rl.report
import rl.rollout
import rl.run
import rl.validation
import train_grpo
from configs.eval_config import EvalConfig
from configs.presets import TINY_CHECKPOINT
from errors import BadInput
from rl.disk import disk_problem
from rl.eval_plan import Key, Task, make_plan
from rl.results import Results, Settings, save_results
from rl.trajectory import Episode, Trajectory
from tests.fakes import FakePolicy
from tests.whole_program import command_line, flags_into, use_fakes

ROOT = Path(__file__).parents[1]
SETTINGS = Settings("x", "abc", "greedy", None, 0, "low-poly", None, "cpu", "float32")
TIMES = ("time/", "rollout/time_s", "rollout/env_steps_per_s", "train/time_s")

# Moment of a run -> (where in the program, at which call of it). Before `run folder` there is nothing to go on with.
LOADING = {
    "load": (train_grpo, "load_policy", 1),
    "preflight": (train_grpo, "check_setup", 1),
}
START = {
    "teacher probe": (train_grpo, "remember_teacher", 1),
    "first checkpoint": (FakePolicy, "save_adapter", 1),
}
RUNNING = {
    "baseline evaluation": (rl.validation, "validate", 1),
    "rollout": (rl.rollout, "decide", 15),  # 6 of the baseline, 6 of the first update: the middle of the second rollout
    "update": (torch.optim.AdamW, "step", 4),  # half of the second update
    "metrics line": (rl.run, "write_all", 3),
    "checkpoint": (torch, "save", 3),  # the adapter is on the disk already
    "pointer": (rl.checkpoints, "point", 4),  # latest, best, latest; then the second update's
    "evaluation": (rl.validation, "validate", 2),
    "evaluation's files": (rl.validation, "write_evaluation", 2),
    "final evaluation": (rl.validation, "validate", 3),
    "report": (rl.report, "write_report", 1),
}
MOMENTS = LOADING | START | RUNNING


def at(monkeypatch, moment: str, act: Callable[..., Any]) -> None:
    """When the run comes to the moment, call `act` (with the arguments that are there) first."""
    owner, name, count = MOMENTS[moment]
    original, calls = getattr(owner, name), 0

    def reached(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            act(*args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, reached)


def raising(error: BaseException) -> Callable[..., None]:
    def act(*_):
        raise error

    return act


def results(run: Path) -> tuple[list, list, dict]:
    """Records without durations, and the last checkpoint's weights and state."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]
    latest = run / "checkpoints" / "latest"
    weights = [np.load(latest / f"{name}.npy").tobytes() for name in ("adapter", "bias")]
    state = torch.load(latest / "trainer.pt")["state"]
    return rows, weights, {key: value for key, value in state.items() if key != "metrics_bytes"}


def only_run(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


def one_line(captured: str) -> str:
    (line,) = captured.splitlines()
    assert line.startswith("train_grpo.py: ")
    return line


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple:
    """The results of a run that nothing stops."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        use_fakes(patch)
        assert command_line(patch, *flags_into(folder)) == 0
    return results(only_run(folder))


@pytest.fixture(autouse=True)
def _fakes(monkeypatch) -> Iterator[None]:
    use_fakes(monkeypatch)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the suite runs in the background
    yield
    signal.signal(signal.SIGINT, before)


def resume(run: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:  # what stopped the run is gone now
        use_fakes(patch)
        return command_line(patch, "--resume", str(run))


# signals


@pytest.mark.parametrize(("script", "number"), [("train_grpo.py", signal.SIGINT), ("eval.py", signal.SIGTERM)])
def test_a_signal_during_the_imports_is_one_line_and_130(script, number):
    """Sent from within the import of torch, the longest of them, by the program's own interpreter."""
    program = f"""
import os, runpy, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Interrupting())
sys.argv = ["{script}", "--checkpoint", "{TINY_CHECKPOINT}", "--device", "cpu"]
runpy.run_path("{script}", run_name="__main__")
"""
    heeding = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)\n"
    done = subprocess.run([sys.executable, "-c", heeding + program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{script}: interrupted\n")


@pytest.mark.parametrize("moment", LOADING)
def test_a_signal_before_the_run_folder_leaves_nothing(monkeypatch, capsys, tmp_path, moment):
    at(monkeypatch, moment, lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 130
    assert one_line(capsys.readouterr().err) == "train_grpo.py: interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", START)
def test_a_signal_before_the_first_checkpoint_has_nothing_to_go_on_with(monkeypatch, capsys, tmp_path, moment):
    at(monkeypatch, moment, lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 130
    said = capsys.readouterr()
    assert (said.out, one_line(said.err)) == ("", "train_grpo.py: interrupted")
    assert resume(only_run(tmp_path)) == 2
    assert "no checkpoint at" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("moment", RUNNING)
def test_a_signal_at_any_moment_is_one_line_and_the_run_goes_on_to_the_same_result(
    monkeypatch, capsys, tmp_path, straight, moment
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
    assert results(run) == straight


def test_a_second_signal_kills(tmp_path):
    def interrupted_twice(patch) -> int:
        again = lambda *_, **__: signal.raise_signal(signal.SIGINT)  # noqa: E731
        patch.setattr(rl.run.Run, "close", again)  # the first one's KeyboardInterrupt closes the run
        at(patch, "rollout", again)
        return command_line(patch, *flags_into(tmp_path))

    assert in_a_process_of_its_own(interrupted_twice) == -signal.SIGINT
    assert resume(only_run(tmp_path)) == 0


# kill -9


def in_a_process_of_its_own(run: Callable[[pytest.MonkeyPatch], int]) -> int:
    """Fork, run, and return how the child ended: a code, or minus a signal. Its patches are its own."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the parent's threads do not exist here
        with pytest.MonkeyPatch.context() as patch:
            os._exit(run(patch))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stopped_at(moment: str, act: Callable[..., Any], folder: Path, *flags: str) -> int:
    """How a run in a process of its own ends that does `act` at the moment."""

    def run(patch) -> int:
        at(patch, moment, act)
        return command_line(patch, *flags_into(folder), *flags)

    return in_a_process_of_its_own(run)


def killed(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", RUNNING)
def test_kill_9_at_any_moment_loses_the_rollout_under_way_at_most(tmp_path, straight, moment):
    assert stopped_at(moment, killed, tmp_path) == -signal.SIGKILL
    run = only_run(tmp_path)
    saved = torch.load(run / "checkpoints" / "latest" / "trainer.pt")["state"]["update"]
    finished = sum("rollout/trajectories" in line for line in (run / "metrics.jsonl").read_text().splitlines())
    assert saved >= finished - 1  # a record comes before its checkpoint
    assert resume(run) == 0
    assert results(run) == straight
    assert list((run / "checkpoints").glob(".*")) == []


@pytest.mark.parametrize("moment", START)
def test_kill_9_before_the_first_checkpoint_has_nothing_to_go_on_with(capfd, tmp_path, moment):
    assert stopped_at(moment, killed, tmp_path) == -signal.SIGKILL
    assert resume(only_run(tmp_path)) == 2
    assert "no checkpoint at" in one_line(capfd.readouterr().err)


@pytest.mark.parametrize("count", [2, 3])
def test_kill_9_between_a_checkpoint_and_its_pointers_leaves_best_as_it_would_be(monkeypatch, tmp_path, count):
    """By returns: the first update is the best (all are equal). Its pointers are the second and the third to be set."""
    monkeypatch.setitem(MOMENTS, "pointer", (rl.checkpoints, "point", count))
    flags = ["--best-by", "return"]
    assert stopped_at("pointer", killed, tmp_path, *flags) == -signal.SIGKILL
    run = only_run(tmp_path)
    assert resume(run) == 0
    assert (run / "checkpoints" / "best").resolve().name == "step_24"
    assert json.loads((run / "checkpoints" / "best" / "metadata.json").read_text())["return_average"] == 1.0


def test_kill_9_within_a_metrics_line_leaves_no_trace_of_it(tmp_path, straight):
    half = lambda descriptor, data: (os.write(descriptor, data[:40]), killed())  # noqa: E731
    assert stopped_at("metrics line", half, tmp_path) == -signal.SIGKILL
    run = only_run(tmp_path)
    assert not (run / "metrics.jsonl").read_text().endswith("\n")
    assert resume(run) == 0
    assert results(run) == straight


# disks


def test_a_checkpoint_that_no_longer_fits_is_one_line_and_the_last_one_stays(monkeypatch, capsys, tmp_path, straight):
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
    assert results(run) == straight


def test_a_checkpoint_that_will_not_fit_is_not_begun(monkeypatch, capsys, tmp_path):
    def full(*_):
        disk = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=1000))
        monkeypatch.setattr(FakePolicy, "save_adapter", raising(AssertionError("nothing may be written")))

    at(monkeypatch, "update", full)
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    line = one_line(capsys.readouterr().err)
    assert "(a checkpoint needs 0.01 GiB; 0.00 GiB are free): make room" in line


def test_a_metrics_line_on_a_full_disk_is_one_line(monkeypatch, capsys, tmp_path, straight):
    """/dev/full refuses as a full disk does."""

    def full(descriptor, _):
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)

    at(monkeypatch, "metrics line", full)
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    assert "(No space left on device; " in one_line(capsys.readouterr().err)
    run = only_run(tmp_path)
    assert (run / "checkpoints" / "latest").resolve().name == "step_24"
    assert resume(run) == 0
    assert results(run) == straight


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (rl.evaluation_files, "write_video", "student-step_48.mp4 could not be written"),
        (rl.evaluation_files, "write_json", "the evaluation's episodes could not be written"),
        (rl.report, "write_report", "no report could be written"),
        (preflight.imageio, "imwrite", "first_frame.png could not be written"),
    ],
)
def test_a_picture_that_does_not_fit_costs_the_picture(monkeypatch, capsys, tmp_path, straight, owner, name, said):
    monkeypatch.setattr(owner, name, raising(OSError(errno.ENOSPC, "No space left on device")))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 0
    shown = capsys.readouterr()
    assert f"{said} ([Errno 28] No space left on device)" in shown.out
    assert shown.err == ""
    assert results(only_run(tmp_path)) == straight


def test_a_log_file_that_does_not_fit_is_said_once(monkeypatch, capsys, tmp_path, straight):
    def full(*_):
        (handler,) = [h for h in train_grpo.log.parent.handlers if isinstance(h, rl.run.LogFile)]
        os.dup2(os.open("/dev/full", os.O_WRONLY), handler.stream.fileno())

    at(monkeypatch, "baseline evaluation", full)
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 0
    shown = capsys.readouterr()
    assert (shown.err, shown.out.count("train.log cannot be written")) == ("", 1)
    assert results(only_run(tmp_path)) == straight


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
    monkeypatch, capsys, tmp_path, tmp_path_factory, straight
):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run"
    at(monkeypatch, "rollout", lambda *_: only_run(tmp_path).rename(elsewhere))
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    assert "is gone" in one_line(capsys.readouterr().err)
    assert resume(elsewhere) == 0
    assert results(elsewhere) == straight


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


def test_an_error_of_the_program_keeps_its_traceback_and_is_in_the_log(monkeypatch, tmp_path):
    at(monkeypatch, "update", raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        command_line(monkeypatch, *flags_into(tmp_path))
    logged = (only_run(tmp_path) / "train.log").read_text()
    assert "Traceback" in logged
    assert logged.endswith("ZeroDivisionError: a bug\n")


# two programs


def test_a_run_that_is_being_written_is_not_resumed(monkeypatch, capfd, tmp_path):
    refused = []

    def second_program(*_):
        code = in_a_process_of_its_own(lambda _: resume(only_run(tmp_path)))
        refused.append((code, capfd.readouterr().err))

    at(monkeypatch, "rollout", second_program)
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 0
    ((code, said),) = refused
    assert code == 2
    assert f"the run is being written by process {os.getpid()} on {os.uname().nodename}" in one_line(said)


def test_a_reader_that_has_gone_is_no_fault(monkeypatch, tmp_path, straight):
    """As with `| tee log` after Ctrl-C, which ends tee, too."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        assert command_line(monkeypatch, *flags_into(tmp_path)) == 0
    assert results(only_run(tmp_path)) == straight


# the clock


@pytest.mark.parametrize("years", [-10, 10])
def test_a_clock_that_is_set_anew_changes_nothing(monkeypatch, tmp_path, straight, years):
    real = time.time
    at(monkeypatch, "rollout", lambda *_: monkeypatch.setattr(time, "time", lambda: real() + years * 3.15e7))
    assert command_line(monkeypatch, *flags_into(tmp_path), "--max-hours", "10") == 0
    assert results(only_run(tmp_path)) == straight


def test_no_duration_is_taken_from_the_clock_that_people_set():
    """time.strftime names run folders, and nothing else asks for the date."""
    packages = ("benchmarks", "configs", "envs", "rl", "vla")
    found = []
    for path in [*ROOT.glob("*.py"), *(path for name in packages for path in (ROOT / name).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            used = isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns")
            imported = isinstance(node, ast.ImportFrom) and {"time", "datetime"} & {a.name for a in node.names}
            if used or imported:
                found.append(f"{path}:{node.lineno}")
    assert found == []


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
