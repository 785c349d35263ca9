"""Whatever stops a run at whatever moment: one line, its checkpoint whole, and --resume gets to the same result.

train_grpo.py runs from its command line to its exit code on fakes: all of the program but network, simulator and the
checks before a run.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import experiment.checkpoints
import experiment.evaluation
import experiment.report
import experiment.run_folder
import experiment.videos
import rl.rollout
import train_grpo
from configs.cli import main_guard
from configs.config import changed
from configs.presets import TINY_CHECKPOINT
from contracts import resolve_pointer
from rl.phases import Teacher
from tests.fakes import FakePolicy, FakePool, Script, observation

ROOT = Path(__file__).parents[1]
FLAGS = [
    "--preset", "smoke", "--warmup-steps", "24", "--transition-steps", "24", "--total-steps", "72", "--n-steps", "24",
    "--eval-interval", "48", "--n-epochs", "1", "--batch-size", "3", "--micro-batch-size", "3",
]  # fmt: skip
FOUND = {"git": {}, "versions": {}, "machine": {"cpus": 1, "gpus": [], "processor": "", "system": ""}}
# What differs from run to run.
VARYING = ("time/", "rollout/time_s", "rollout/env_steps_per_s", "train/time_s", "system/")

# Moment of a run -> (where in the program, at which call of it): before its first checkpoint, and then.
START = {"first checkpoint": (FakePolicy, "save_adapter", 1)}
RUNNING = {
    "baseline evaluation": (experiment.evaluation, "validate", 1),
    "rollout": (
        rl.rollout,
        "decide",
        15,
    ),  # 6 of the baseline, 6 of the first update: the middle of the second rollout
    "update": (torch.optim.AdamW, "step", 4),  # half of the second update
    "metrics line": (experiment.run_folder, "write_and_flush", 3),
    "adapter": (FakePolicy, "save_adapter", 3),
    "checkpoint": (torch, "save", 3),  # the adapter is on the disk already
    "rename": (Path, "rename", 3),  # all of it is
    "pointer": (experiment.checkpoints, "write_pointer", 4),  # latest, best, latest; then the second update's
    "evaluation's files": (experiment.evaluation, "write_evaluation", 2),
    "report": (experiment.report, "write_report", 1),
}
MOMENTS = START | RUNNING


@pytest.fixture(autouse=True)
def _fakes(monkeypatch) -> Iterator[None]:
    straight()  # once, before anything is patched
    use_fakes(monkeypatch)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the suite runs in the background
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def use_fakes(monkeypatch) -> None:
    """Let train_grpo.py run on a policy of a few hundred numbers and scripted episodes."""
    preflight = SimpleNamespace(
        choose_looks=lambda config: (changed(config, assets="lowpoly"), ""),
        Checks=lambda *_: None,
        check_machine=lambda *_: None,
        check_only=lambda *_: None,
        check_setup=lambda *_: observation(1.0, 2.0, 3.0),
        find_tasks=lambda *_: ((None, []), ""),
        fit_micro_batch=lambda config, _: (config.update.micro_batch_size, ""),
        load_policy=lambda *_: FakePolicy(adapter_scale=0.1),
        load_teacher=lambda *_: Teacher("greedy", ""),
        log_setup=lambda *_: None,
        save_model_view=lambda *_: None,
    )
    monkeypatch.setitem(sys.modules, "preflight", preflight)
    monkeypatch.setattr(
        train_grpo, "make_pool", lambda *_: FakePool(lambda *_: Script(env_steps=8, success=True))
    )
    monkeypatch.setattr(experiment.run_folder, "provenance", lambda argv: {"argv": list(argv), **FOUND})
    monkeypatch.setattr(
        experiment.evaluation, "write_video", lambda path, frames: path.write_bytes(b"a video")
    )
    monkeypatch.setattr(
        experiment.report, "write_report", lambda stored: stored.folder / "report" / "index.html"
    )


def command_line(monkeypatch, *argv: str) -> int:
    """Exit code of `python train_grpo.py ARGV`."""
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *argv])
    return main_guard("train_grpo.py", train_grpo.main)


def start(monkeypatch, folder: Path, *flags: str) -> int:
    return command_line(monkeypatch, *FLAGS, "--output", str(folder), *flags)


def resumes_to_the_same_result(run: Path) -> bool:
    with pytest.MonkeyPatch.context() as patch:  # what stopped the run is gone now
        use_fakes(patch)
        return command_line(patch, "--resume", str(run)) == 0 and results(run) == straight()


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


def stopped_at(moment: str, act: Callable[..., Any], folder: Path, *flags: str) -> int:
    """How a run in a forked process ends that does `act` at the moment: a code, or minus a signal."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the parent's threads do not exist here
        with pytest.MonkeyPatch.context() as patch:
            at(patch, moment, act)
            os._exit(start(patch, folder, *flags))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def results(run: Path) -> tuple[list, list, dict]:
    """Records without durations, and the last checkpoint's weights and state."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if not key.startswith(VARYING)} for row in rows]
    latest = resolve_pointer(run / "checkpoints" / "latest")
    weights = [np.load(latest / f"{name}.npy").tobytes() for name in ("adapter", "bias")]
    state = torch.load(latest / "trainer.pt")["state"]
    return rows, weights, {key: value for key, value in state.items() if key != "metrics_bytes"}


@cache
def straight() -> tuple[list, list, dict]:
    """The results of a run that nothing stops."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        use_fakes(patch)
        assert start(patch, Path(folder)) == 0
        return results(only_run(Path(folder)))


def only_run(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


def one_line(captured: str) -> str:
    (line,) = captured.splitlines()
    assert line.startswith("train_grpo.py: ")
    return line


@pytest.mark.parametrize(
    ("script", "number"), [("train_grpo.py", signal.SIGINT), ("eval.py", signal.SIGTERM)]
)
def test_a_signal_during_the_imports_is_one_line_and_130(script, number):
    """Sent from within the import of torch, the longest of them, by the program's own interpreter."""
    program = f"""
import os, runpy, signal, sys
signal.signal({int(number)}, signal.SIG_DFL)
class Interrupting:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Interrupting())
sys.argv = ["{script}", "--checkpoint", "{TINY_CHECKPOINT}", "--device", "cpu"]
runpy.run_path("{script}", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{script}: interrupted\n")


@pytest.mark.parametrize("moment", RUNNING)
def test_a_signal_at_any_moment_is_one_line_and_the_run_goes_on_to_the_same_result(
    monkeypatch, capsys, tmp_path, moment
):
    number = signal.SIGINT if len(moment) % 2 else signal.SIGTERM  # both take the same path
    at(monkeypatch, moment, lambda *_: signal.raise_signal(number))
    assert start(monkeypatch, tmp_path) == 130
    said, run = capsys.readouterr(), only_run(tmp_path)
    assert one_line(said.err) == "train_grpo.py: interrupted"
    assert said.out.splitlines()[-1] == f"stopped; go on with: python train_grpo.py --resume {run}"
    assert (run / "train.log").read_text().splitlines()[-1] == "interrupted"
    assert not list((run / "checkpoints").glob(".writing-*"))
    assert resumes_to_the_same_result(run)


@pytest.mark.parametrize("moment", RUNNING)
def test_kill_9_at_any_moment_loses_the_rollout_under_way_at_most(tmp_path, moment):
    assert stopped_at(moment, killed, tmp_path) == -signal.SIGKILL
    run = only_run(tmp_path)
    saved = torch.load(resolve_pointer(run / "checkpoints" / "latest") / "trainer.pt")["state"]["update"]
    finished = sum(
        "rollout/trajectories" in line for line in (run / "metrics.jsonl").read_text().splitlines()
    )
    assert saved >= finished - 1  # a record comes before its checkpoint
    assert resumes_to_the_same_result(run)
    assert list((run / "checkpoints").glob(".*")) == []


@pytest.mark.parametrize("moment", START)
def test_kill_9_before_the_first_checkpoint_has_nothing_to_go_on_with(monkeypatch, capfd, tmp_path, moment):
    assert stopped_at(moment, killed, tmp_path) == -signal.SIGKILL
    assert command_line(monkeypatch, "--resume", str(only_run(tmp_path))) == 2
    assert "no checkpoint at" in one_line(capfd.readouterr().err)


@pytest.mark.parametrize("count", [2, 3])
def test_kill_9_between_a_checkpoint_and_its_pointers_leaves_best_as_it_would_be(
    monkeypatch, tmp_path, count
):
    """By returns: the first update is the best (all are equal). Its pointers are the second and the third to be set."""
    monkeypatch.setitem(MOMENTS, "pointer", (experiment.checkpoints, "write_pointer", count))
    assert stopped_at("pointer", killed, tmp_path, "--best-by", "return", "--no-warmup") == -signal.SIGKILL
    run = only_run(tmp_path)
    assert command_line(monkeypatch, "--resume", str(run)) == 0
    best = resolve_pointer(run / "checkpoints" / "best")
    assert best.name == "step_24"
    assert json.loads((best / "metadata.json").read_text())["return_average"] == 1.0


def test_kill_9_within_a_metrics_line_leaves_no_trace_of_it(tmp_path):
    half = lambda descriptor, data: (os.write(descriptor, data[:40]), killed())  # noqa: E731
    assert stopped_at("metrics line", half, tmp_path) == -signal.SIGKILL
    run = only_run(tmp_path)
    assert not (run / "metrics.jsonl").read_text().endswith("\n")
    assert resumes_to_the_same_result(run)


def test_a_checkpoint_that_no_longer_fits_is_one_line_and_the_last_one_stays(monkeypatch, capsys, tmp_path):
    """The kernel refuses the file's growth half-way (RLIMIT_FSIZE: it needs no root and no disk of one's own)."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    at(monkeypatch, "checkpoint", lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard)))
    try:
        assert start(monkeypatch, tmp_path) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    line, run = one_line(capsys.readouterr().err), only_run(tmp_path)
    assert ": make room, lower --keep-checkpoints" in line
    assert line.endswith((run / "train.log").read_text().splitlines()[-1])  # the log says why the run ended
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best", "latest", "step_0", "step_24"]
    assert resumes_to_the_same_result(run)


def test_a_metrics_line_on_a_full_disk_is_one_line(monkeypatch, capsys, tmp_path):
    """/dev/full refuses as a full disk does."""
    at(
        monkeypatch,
        "metrics line",
        lambda descriptor, _: os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor),
    )
    assert start(monkeypatch, tmp_path) == 2
    assert "(No space left on device): make room" in one_line(capsys.readouterr().err)
    run = only_run(tmp_path)
    assert resolve_pointer(run / "checkpoints" / "latest").name == "step_24"
    assert resumes_to_the_same_result(run)


def test_a_run_whose_folder_was_moved_stops_and_goes_on_in_its_new_place(
    monkeypatch, capsys, tmp_path, tmp_path_factory
):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run"
    at(monkeypatch, "rollout", lambda *_: only_run(tmp_path).rename(elsewhere))
    assert start(monkeypatch, tmp_path) == 2
    assert "is gone" in one_line(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
    assert resumes_to_the_same_result(elsewhere)


def test_evaluations_are_exact_whatever_physics_trains(monkeypatch, tmp_path):
    pool = FakePool(lambda *_: Script(env_steps=8, success=True))
    monkeypatch.setattr(train_grpo, "make_pool", lambda *_: pool)
    assert start(monkeypatch, tmp_path, "--physics", "fast", "--train-init-states", "0", "40") == 0
    assert {(state >= 40, physics) for (_, state), physics in zip(pool.started, pool.physics, strict=True)} == {
        (True, "exact"), (False, "fast"),
    }  # fmt: skip
