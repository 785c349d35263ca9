"""Whatever stops a run at whatever moment: one line, its checkpoint whole, and --resume gets to the same result.

train_grpo.py runs from its command line to its exit code on fakes: all of the program but network, simulator and the
checks before a run.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import experiment.checkpoints
import experiment.evaluation
import experiment.evaluator
import experiment.report
import experiment.run_folder
import experiment.setup
import preflight
import train_grpo
from command_line import STOP_SIGNALS, main_guard
from configs.presets import TINY_CHECKPOINT
from contracts import resolve_pointer
from envs.env import TaskInfo
from experiment.stored_run import METRICS_FILE, read_metrics
from rl.teacher_choice import TeacherChoice
from rl.update_metrics import MAX_UPDATES_WITHOUT_SIGNAL
from tests.fakes import FakePolicy, FakePool, Script, observation
from tests.stored_runs import comparable_metrics
from vla.memory import Plan

ROOT = Path(__file__).parents[1]
# Three updates of three episodes each: warmup, transition, RL. Evaluations at 0, 24, 48 and 72 env steps.
FLAGS = [
    "--preset", "smoke", "--warmup-steps", "24", "--transition-steps", "24", "--total-steps", "72", "--n-steps", "24",
    "--eval-interval", "48", "--n-epochs", "1", "--batch-size", "3", "--micro-batch-size", "3",
]  # fmt: skip
MACHINE = {"cpus": 1, "gpus": [], "gpu_gib": [], "processor": "", "system": ""}
FOUND = {"git": {}, "versions": {}, "machine": MACHINE}


# Moments: a function, and the checkpoint that `latest` names when it is called. In the second update step_24 is saved,
# step_48 is not.
ROLLOUT = (FakePool, "step", "step_24")
CHECKPOINT = (torch, "save", "step_24")  # the adapter is on the disk already
POINTER = (experiment.checkpoints, "write_pointer", "step_24")  # all of the checkpoint is on the disk
LAST_EVALUATION = (experiment.evaluation, "play_evaluation", "step_72")


@pytest.fixture(autouse=True)
def _fakes(monkeypatch) -> Iterator[None]:
    straight()  # once, before anything is patched
    use_fakes(monkeypatch)
    handlers = {stop_signal: signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the suite runs in the background
    yield
    for stop_signal, handler in handlers.items():
        signal.signal(stop_signal, handler)


def use_fakes(monkeypatch) -> None:
    """Let train_grpo.py run on a policy of a few hundred numbers and scripted episodes."""
    fakes = {
        "find_renderer_apart": lambda *_: "a renderer",
        "find_tasks": lambda *_: [TaskInfo(0, "", "", 8, 50)],
        "load_policy": lambda *_: FakePolicy(adapter_scale=0.1),
        "describe_policy": lambda _: [],
        "choose_and_keep_teacher": lambda *_: TeacherChoice("greedy", ""),
        "make_pool": lambda *_: FakePool(lambda *_: Script(env_steps=8, success=True)),
        "first_observation": lambda *_: observation(1.0, 2.0, 3.0),
        "choose_looks": lambda *_: "lowpoly",
        "plan_memory": lambda *_: Plan(3, 0),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(experiment.setup, name, fake)
    for name in ("check_packages", "check_device"):
        monkeypatch.setattr(preflight, name, lambda *_: None)
    monkeypatch.setattr(train_grpo, "probe", lambda _: None)
    monkeypatch.setattr(experiment.run_folder, "provenance", lambda argv: {"argv": list(argv), **FOUND})
    monkeypatch.setattr(
        experiment.evaluator, "write_video", lambda path, frames: path.write_bytes(b"a video")
    )
    monkeypatch.setattr(
        experiment.report, "write_report", lambda stored: stored.folder / "report" / "index.html"
    )


def command_line(monkeypatch, *argv: str) -> int:
    """Exit code of `python train_grpo.py ARGV`."""
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *argv])
    return main_guard("train_grpo.py", train_grpo.main)


def start(monkeypatch, output: Path, *flags: str) -> int:
    return command_line(monkeypatch, *FLAGS, "--output", str(output), *flags)


def resumes_to_the_same_result(run: Path) -> bool:
    with pytest.MonkeyPatch.context() as patch:  # what stopped the run is gone now
        use_fakes(patch)
        return command_line(patch, "--resume", str(run)) == 0 and results(run) == straight()


def at(monkeypatch, output: Path, moment: tuple[object, str, str], act: Callable[..., None]) -> None:
    """When the run in `output` first comes to the moment, call `act`, with the arguments of the function."""
    owner, function, latest = moment
    original = getattr(owner, function)
    has_come = False

    def patched(*args, **kwargs):
        nonlocal has_come
        if not has_come and pointer(output, "latest") == latest:
            has_come = True
            act(*args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, function, patched)


def pointer(output: Path, name: str) -> str | None:
    """The checkpoint that `latest` or `best` of the only run names."""
    for path in output.glob(f"*/checkpoints/{name}"):
        return path.read_text().strip()
    return None


def killed_at(moment: tuple[object, str, str], output: Path, *flags: str) -> Path:
    """The folder of a run in a forked process that dies by kill -9 at the moment."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the parent's threads do not exist here
        with pytest.MonkeyPatch.context() as patch:
            at(patch, output, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            os._exit(start(patch, output, *flags))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return only_run(output)


def results(run: Path) -> tuple[list, bytes, dict]:
    """Records without durations, and the last checkpoint's weights and state."""
    latest = resolve_pointer(run / "checkpoints" / "latest")
    weights = (latest / "adapter.safetensors").read_bytes()
    state = stored_state(run)
    del state["metrics_bytes"]
    return comparable_metrics(run), weights, state


def stored_state(run: Path) -> dict:
    return torch.load(resolve_pointer(run / "checkpoints" / "latest") / "trainer.pt")["state"]


@cache
def straight() -> tuple[list, bytes, dict]:
    """The results of a run that nothing stops."""
    with TemporaryDirectory() as output, pytest.MonkeyPatch.context() as patch:
        use_fakes(patch)
        assert start(patch, Path(output)) == 0
        return results(only_run(Path(output)))


def only_run(output: Path) -> Path:
    (run,) = output.iterdir()
    return run


def one_line(errors: str) -> str:
    (line,) = errors.splitlines()
    assert line.startswith("train_grpo.py: ")
    return line


# signals


def test_a_signal_during_the_imports_is_one_line_and_130():
    """Sent from within the import of torch, the longest of them, by the program's own interpreter."""
    program = f"""
import os, runpy, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)
class Interrupting:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["train_grpo.py", "--checkpoint", "{TINY_CHECKPOINT}", "--device", "cpu"]
runpy.run_path("train_grpo.py", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "train_grpo.py: interrupted\n")


def test_after_a_signal_during_a_rollout_the_run_goes_on_to_the_same_result(monkeypatch, capsys, tmp_path):
    at(monkeypatch, tmp_path, ROLLOUT, lambda *_: signal.raise_signal(signal.SIGTERM))
    assert start(monkeypatch, tmp_path) == 130
    one_line(capsys.readouterr().err)
    assert resumes_to_the_same_result(only_run(tmp_path))


# kill -9


@pytest.mark.parametrize("moment", [CHECKPOINT, POINTER])
def test_kill_9_while_a_checkpoint_is_written_loses_the_rollout_under_way_at_most(tmp_path, moment):
    run = killed_at(moment, tmp_path)
    finished = sum("rollout/trajectories" in row for row in read_metrics(run / METRICS_FILE))
    assert stored_state(run)["updates_done"] >= finished - 1  # a record comes before its checkpoint
    assert resumes_to_the_same_result(run)
    assert list((run / "checkpoints").glob(".*")) == []


# disks


def test_a_checkpoint_that_no_longer_fits_is_one_line_and_the_last_one_stays(monkeypatch, capsys, tmp_path):
    """The kernel refuses the file's growth half-way (RLIMIT_FSIZE: it needs no root and no disk of one's own)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit_file_size(*_) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))

    at(monkeypatch, tmp_path, CHECKPOINT, limit_file_size)
    try:
        assert start(monkeypatch, tmp_path) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    line = one_line(capsys.readouterr().err)
    run = only_run(tmp_path)
    assert "--keep-checkpoints" in line
    reason = line.removeprefix("train_grpo.py: ")
    assert (run / "train.log").read_text().endswith(f"  {reason}\n")  # the log says why the run ended
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best", "latest", "step_0", "step_24"]
    assert resumes_to_the_same_result(run)


# the loop


def test_the_limit_of_updates_without_a_signal_counts_on_after_a_resume(monkeypatch, capsys, tmp_path):
    hopeless = FakePool(lambda *_: Script(env_steps=8, success=False))
    monkeypatch.setattr(experiment.setup, "make_pool", lambda *_: hopeless)
    at(monkeypatch, tmp_path, (FakePool, "step", "step_96"), lambda *_: signal.raise_signal(signal.SIGINT))
    assert start(monkeypatch, tmp_path, "--no-warmup", "--total-steps", "1000") == 130
    run = only_run(tmp_path)
    assert stored_state(run)["updates_without_signal"] == 4
    capsys.readouterr()
    assert command_line(monkeypatch, "--resume", str(run)) == 2
    assert "no learning signal" in one_line(capsys.readouterr().err)
    assert stored_state(run)["updates_done"] == MAX_UPDATES_WITHOUT_SIGNAL


def test_a_finished_run_that_is_continued_keeps_its_last_evaluation_and_its_best(monkeypatch, tmp_path):
    """Of two episodes none succeeds until 48, both at 72 and one at 96."""
    failing = {40, 41}
    pool = FakePool(lambda _, init_state_id: Script(env_steps=8, success=init_state_id not in failing))
    monkeypatch.setattr(experiment.setup, "make_pool", lambda *_: pool)
    at(monkeypatch, tmp_path, LAST_EVALUATION, lambda *_: failing.clear())
    assert start(monkeypatch, tmp_path, "--eval-init-states", "40", "42") == 0
    run = only_run(tmp_path)
    records = read_metrics(run / METRICS_FILE)
    assert command_line(monkeypatch, "--resume", str(run)) == 0  # there is nothing left to do
    assert read_metrics(run / METRICS_FILE) == records
    failing.add(40)
    assert command_line(monkeypatch, "--resume", str(run), "--total-steps", "96") == 0
    rows = read_metrics(run / METRICS_FILE)
    name = "eval/greedy_success"
    successes = [(row["global_step"], row[name]) for row in rows if name in row]
    assert successes == [(0, 0.0), (48, 0.0), (72, 1.0), (96, 0.5)]
    assert pointer(tmp_path, "best") == "step_72"


def test_evaluations_are_exact_whatever_physics_trains(monkeypatch, tmp_path):
    pool = FakePool(lambda *_: Script(env_steps=8, success=True))
    monkeypatch.setattr(experiment.setup, "make_pool", lambda *_: pool)
    assert start(monkeypatch, tmp_path, "--physics", "fast", "--train-init-states", "0", "40") == 0
    is_evaluation = [init_state_id >= 40 for _, init_state_id in pool.started]
    assert set(zip(is_evaluation, pool.physics, strict=True)) == {(True, "exact"), (False, "fast")}
