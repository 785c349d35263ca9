"""scripts/train_detached.sh around a stand-in for train_grpo.py, which runs until a FIFO is opened."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_detached.sh"

STAND_IN = """
import pathlib, signal, sys

if "--bad" in sys.argv:
    sys.exit("train_grpo.py: --bad is no flag")

def stop(*_):
    (run / "checkpoints" / "step_40").mkdir(exist_ok=True)
    (run / "checkpoints" / "latest").symlink_to("step_40")
    print("train_grpo.py: interrupted", flush=True)
    sys.exit(130)

run = pathlib.Path("runs/R")
if "--resume" in sys.argv:
    (run / "checkpoints" / "latest").unlink(missing_ok=True)
(run / "checkpoints").mkdir(parents=True, exist_ok=True)
(run / "report").mkdir(exist_ok=True)
(run / "metrics.jsonl").write_text('{"global_step": 32}\\n{"global_step": 40, "x": 1}\\n')
signal.signal(signal.SIGTERM, stop)
pathlib.Path("argv").write_text(" ".join(sys.argv[1:]))
print("run folder  runs/R", flush=True)
with open("end"):  # until the other end is opened
    print("finished", flush=True)
(run / "report" / "curves.png").touch()
"""


@pytest.fixture
def project(tmp_path):
    """A project whose train_grpo.py is the stand-in; what is left running ends with the test."""
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "train_grpo.py").write_text(STAND_IN)
    os.mkfifo(tmp_path / "end")
    yield tmp_path
    detached(tmp_path, "stop")


def detached(project, *argv) -> subprocess.CompletedProcess:
    environ = {name: value for name, value in os.environ.items() if name != "VLA_GRPO_DETACHED"}
    return subprocess.run(
        [project / "scripts" / SCRIPT.name, *argv], capture_output=True, text=True, timeout=60, env=environ
    )


def process_of(project) -> int:
    return int((project / "runs/detached/pid").read_text())


def finish(project) -> None:
    """Let the stand-in end, and wait for it as `stop` does."""
    (project / "end").open("w").close()
    subprocess.run(["flock", "--shared", project / "runs/detached/pid", "true"], check=True, timeout=60)


def test_nothing_runs_in_a_fresh_checkout(project):
    assert detached(project, "status").returncode == 3
    for verb in ("stop", "resume"):
        done = detached(project, verb)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1


def test_a_run_is_started_once_in_a_session_of_its_own_with_its_flags(project):
    started = detached(project, "start", "--task-id", "3")
    assert started.returncode == 0, started.stderr
    assert (project / "argv").read_text() == "--task-id 3"
    pid = process_of(project)
    assert os.getsid(pid) == pid
    again = detached(project, "start", "--task-id", "4")
    assert again.returncode == 2
    assert f"already running (process {pid})" in again.stderr
    assert process_of(project) == pid
    assert (project / "argv").read_text() == "--task-id 3"


def test_status_tells_process_folder_step_and_last_line(project):
    detached(project, "start")
    status = detached(project, "status")
    assert status.returncode == 0
    assert f"running (process {process_of(project)})" in status.stdout
    assert "run folder runs/R, global step 40" in status.stdout
    assert "last line: run folder  runs/R" in status.stdout


def test_stop_waits_for_the_end_and_names_the_checkpoint(project):
    detached(project, "start")
    stopped = detached(project, "stop")
    assert stopped.returncode == 0
    assert "newest checkpoint runs/R/checkpoints/step_40" in stopped.stdout
    assert detached(project, "status").returncode == 3


def test_resume_goes_on_with_the_run_that_was_started_last_and_keeps_the_log(project):
    detached(project, "start")
    detached(project, "stop")
    assert detached(project, "resume").returncode == 0
    assert (project / "argv").read_text() == "--resume runs/R"
    assert "interrupted" in (project / "runs/detached/log").read_text()


def test_a_finished_run_is_not_resumed_unless_it_gets_new_flags(project):
    detached(project, "start")
    finish(project)
    (project / "argv").unlink()
    done = detached(project, "resume")
    assert done.returncode == 0
    assert "runs/R is finished" in done.stdout
    assert not (project / "argv").exists()
    assert detached(project, "resume", "runs/R", "--total-steps", "9").returncode == 0
    assert (project / "argv").read_text() == "--resume runs/R --total-steps 9"


def test_a_kill_or_a_reboot_leaves_nothing_that_stands_in_the_way(project):
    detached(project, "start")
    os.kill(process_of(project), signal.SIGKILL)
    subprocess.run(["flock", "--shared", project / "runs/detached/pid", "true"], check=True, timeout=60)
    (project / "runs/detached/pid").write_text(f"{os.getpid()}\n")  # a number that another process has by now
    assert detached(project, "status").returncode == 3
    assert detached(project, "resume").returncode == 0


def test_a_start_that_fails_tells_its_reason_and_exit_code(project):
    failed = detached(project, "start", "--bad")
    assert failed.returncode == 1
    assert "--bad is no flag" in failed.stderr
    assert detached(project, "status").returncode == 3


def test_an_unknown_verb_lists_the_verbs(project):
    done = detached(project, "begin")
    assert done.returncode == 2
    assert "start" in done.stderr
