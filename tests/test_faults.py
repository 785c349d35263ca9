"""Whatever stops a run at whatever moment: one line, its checkpoint whole, and --resume gets to the same result.

The moments are those of docs/FAULTS.md; the program runs from its command line, on fakes (tests/whole_program.py).
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rl.checkpoints
import rl.run
from configs.presets import TINY_CHECKPOINT
from tests.whole_program import (
    LOADING,
    MOMENTS,
    RUNNING,
    START,
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

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _fakes(monkeypatch) -> Iterator[None]:
    straight()  # once, before anything is patched
    use_fakes(monkeypatch)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the suite runs in the background
    yield
    signal.signal(signal.SIGINT, before)


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
        again = lambda *_, **__: signal.raise_signal(signal.SIGINT)  # noqa: E731
        patch.setattr(rl.run.Run, "close", again)  # the first one's KeyboardInterrupt closes the run
        at(patch, "rollout", again)
        return command_line(patch, *flags_into(tmp_path))

    assert in_a_process_of_its_own(interrupted_twice) == -signal.SIGINT
    assert resume(only_run(tmp_path)) == 0


# kill -9


@pytest.mark.parametrize("moment", RUNNING)
def test_kill_9_at_any_moment_loses_the_rollout_under_way_at_most(tmp_path, moment):
    assert stopped_at(moment, killed, tmp_path) == -signal.SIGKILL
    run = only_run(tmp_path)
    saved = torch.load(run / "checkpoints" / "latest" / "trainer.pt")["state"]["update"]
    finished = sum("rollout/trajectories" in line for line in (run / "metrics.jsonl").read_text().splitlines())
    assert saved >= finished - 1  # a record comes before its checkpoint
    assert resume(run) == 0
    assert results(run) == straight()
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


def test_kill_9_within_a_metrics_line_leaves_no_trace_of_it(tmp_path):
    half = lambda descriptor, data: (os.write(descriptor, data[:40]), killed())  # noqa: E731
    assert stopped_at("metrics line", half, tmp_path) == -signal.SIGKILL
    run = only_run(tmp_path)
    assert not (run / "metrics.jsonl").read_text().endswith("\n")
    assert resume(run) == 0
    assert results(run) == straight()


# faults of the program


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


def test_a_reader_that_has_gone_is_no_fault(monkeypatch, tmp_path):
    """As with `| tee log` after Ctrl-C, which ends tee, too."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        assert command_line(monkeypatch, *flags_into(tmp_path)) == 0
    assert results(only_run(tmp_path)) == straight()


# the clock


@pytest.mark.parametrize("years", [-10, 10])
def test_a_clock_that_is_set_anew_changes_nothing(monkeypatch, tmp_path, years):
    real = time.time
    at(monkeypatch, "rollout", lambda *_: monkeypatch.setattr(time, "time", lambda: real() + years * 3.15e7))
    assert command_line(monkeypatch, *flags_into(tmp_path), "--max-hours", "10") == 0
    assert results(only_run(tmp_path)) == straight()


def test_no_duration_is_taken_from_the_clock_that_people_set():
    """time.strftime names run folders, and nothing else asks for the date."""
    packages = ("benchmarks", "configs", "envs", "rl", "untrusted", "vla")
    found = []
    for path in [*ROOT.glob("*.py"), *(path for name in packages for path in (ROOT / name).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            used = isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns")
            imported = isinstance(node, ast.ImportFrom) and {"time", "datetime"} & {a.name for a in node.names}
            if used or imported:
                found.append(f"{path}:{node.lineno}")
    assert found == []
